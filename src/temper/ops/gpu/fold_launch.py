"""Folding by kernels: the weights of a site in one launch, their gradients in three."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from temper.ops.gpu import tiles
from temper.ops.gpu.launch import Launch, cdiv, power, run
from temper.ops.plan import GENERATOR_KINDS

# Features per program.
BLOCK = 128
# The number of tensors of a gain, by its code (`temper.norm.GAINS`).
_GAIN_TENSORS = (1, 2, 1, 0)
_NONE = (None,) * 7


class _Head(NamedTuple):
    """The kernels' description of a head.

    Args:
        numbers: HEAD of `kernels.fold`.
        places: which of the seven tensors each of the stored ones is.
        lines: how many lines it has.
        sums: how many sums over features its gradients take.
    """

    numbers: tuple[int, ...]
    places: tuple[int, ...]
    lines: int
    sums: int


@lru_cache(maxsize=1024)
def _heads(generators: tuple[int, ...]) -> tuple[_Head, _Head, _Head]:
    num_streams, _, gain, *numbers = generators
    heads: list[_Head] = []
    row, place, logit, at = 0, 0, 0, num_streams if gain == 1 else 0
    for _ in range(3):
        kind, count, *numbers = numbers
        modes, numbers = numbers[:count], numbers[count:]
        name, logits = GENERATOR_KINDS[kind], math.prod(modes)
        first, second = modes[0], math.prod(modes[1:])
        a = b = other = inner = 1
        places: tuple[int, ...] = (2,)
        if name == "dense":
            rows, first, second = logits, logits, 1
        elif name == "cp":
            (rows, *numbers), places = numbers, (0, 2, 3, 4)[: 2 + count]
        elif name == "tucker":
            (a, b, *outer), numbers = numbers[: 2 + count], numbers[2 + count :]
            rows, other, inner, places = math.prod(outer), math.prod(outer[1:]), b, (1, 0, 2, 3, 4)[: 3 + count]
        else:
            (a, rows, *bonds), numbers = numbers[: 1 + count], numbers[1 + count :]
            other, inner, places = math.prod(bonds), a, (0, 2, 3, 4)[: 2 + count]
        lines = {"dense": rows, "cp": rows, "tucker": b, "tt": a * rows}[name]
        sums = rows if name == "dense" else rows * inner * num_streams
        padded = (power(b), power(first), power(second), power(rows // other), power(other))
        values = (kind, a, b, inner, rows, row, place, logit, first, second, other, at, *padded)
        heads.append(_Head(values, (*places, 5, 6), lines, sums))
        row, logit, at = row + rows, logit + logits, at + sums
        place += 0 if name == "dense" else rows * logits
    return heads[0], heads[1], heads[2]


def serves(generators: Sequence[int]) -> bool:
    """Whether the kernels can fold these generators: every head has one output mode or two."""
    numbers = list(generators[3:])
    for _ in range(3):
        kind, count, *numbers = numbers
        if count > 2:
            return False
        ranks = {"dense": 0, "cp": 1, "tucker": 2 + count, "tt": 1 + count}[GENERATOR_KINDS[kind]]
        numbers = numbers[count + ranks :]
    return True


# The effect of torch.compiler.assume_constant_result, without importing the compiler.
serves._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _grouped(tensors: Sequence[Tensor], generators: tuple[int, ...]) -> tuple[tuple[Any, ...], ...]:
    """The gain's two tensors, and the seven of each head; None for those that are not there."""
    count = _GAIN_TENSORS[generators[2]]
    groups: list[tuple[Any, ...]] = [tuple([*tensors[:count], None, None][:2])]
    for head in _heads(generators):
        group: list[Any] = list(_NONE)
        for place in head.places:
            group[place], count = tensors[count], count + 1
        groups.append(tuple(group))
    return tuple(groups)


def _constants(generators: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    pre, res, post = (head.numbers for head in _heads(generators))
    sizes = {"N": generators[0], "NP": power(generators[0], 2), "WIDE": dtype}
    return {"GAIN": generators[2], "PRE": pre, "RES": res, "POST": post, **sizes}


def fold(tensors: Sequence[Tensor], generators: Sequence[int], results: Sequence[Tensor]) -> None:
    """Fills in_map, out and bias."""
    key, dim = tuple(generators), generators[1]
    gains, pre, res, post = _grouped([tensor.contiguous() for tensor in tensors], key)
    arguments: dict[str, Any] = {"gains": gains, "pre": pre, "res": res, "post": post}
    arguments |= dict(zip(("in_map", "out", "biases"), results, strict=True))
    arguments |= {"D": dim, **_constants(key, results[0].dtype), "BD": BLOCK}
    run(Launch("fold", (cdiv(dim, BLOCK), len(results[0])), arguments, 4, 1))


def fold_backward(
    d_in: Tensor, d_out: Tensor, d_bias: Tensor, tensors: Sequence[Tensor], generators: Sequence[int],
    results: Sequence[Tensor],
) -> None:  # fmt: skip
    """Fills the gradients of the tensors."""
    key, dim = tuple(generators), generators[1]
    heads, constants = _heads(key), _constants(key, d_in.dtype)
    gains, pre, res, post = _grouped([tensor.contiguous() for tensor in tensors], key)
    d_gains, *slopes = _grouped(results, key)
    d_in, d_out, d_bias = d_in.contiguous(), d_out.contiguous(), d_bias.contiguous()
    width = (generators[0] if generators[2] == 1 else 0) + sum(head.sums for head in heads)
    blocks, lines = cdiv(dim, BLOCK), tuple(head.lines for head in heads)
    parts = d_in.new_empty(blocks, width)
    arguments: dict[str, Any] = {"gains": gains, "pre": pre, "res": res, "post": post, "d_gains": d_gains}
    arguments |= {"d_lines": tuple(slope[2] for slope in slopes), "d_in": d_in, "parts": parts, "D": dim}
    arguments |= {"WIDTH": width, **constants, "LINES": lines, "BD": BLOCK}
    # 512 threads for many streams, or a thread would hold too many of them; a warp of AMD's has 64.
    is_amd = tiles.target_of(d_in.device).startswith("gfx")
    warps = 4 if constants["NP"] <= 8 else 8 if is_amd else 16
    run(Launch("fold_backward", (blocks, 1 + len(d_in) + sum(lines)), arguments, warps, 1))
    arguments = {"pre": pre, "res": res, "post": post, "d_gains": d_gains}
    arguments |= {f"d_{name}": slope for name, slope in zip(("pre", "res", "post"), slopes, strict=True)}
    arguments |= {"sums": parts.sum(0), "d_out": d_out, "d_biases": d_bias, **constants}
    run(Launch("fold_small_backward", (3, 4), arguments, 4, 1))
