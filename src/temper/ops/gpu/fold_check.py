"""The definition of folding in plain torch, from a site's packed generators, and a random case to compare kernels with.

Letters: N streams, D features, O and P output modes, R rows; lower case in equations, with a, b, q and x for ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from temper.ops.gpu import fold_launch
from temper.ops.plan import GENERATOR_KINDS

Shape = tuple[int, ...]


class _Kind(NamedTuple):
    """A way to store a generator.

    Args:
        num_ranks: how many ranks it has, for a number of output modes.
        shapes: the shapes of its tensors, from all modes and the ranks.
        in_maps: the equation of in_map, for one output mode and for two; it takes the first tensors.
        out_maps: the same of the output map, which takes the others; None if the rows are the logits.
    """

    num_ranks: Callable[[int], int]
    shapes: Callable[[Shape, Shape], list[Shape]]
    in_maps: tuple[str, str]
    out_maps: tuple[str, str] | None


_KINDS = {
    "dense": _Kind(lambda outs: 0, lambda modes, _: [modes], ("ndo->ond", "ndop->opnd"), None),
    "cp": _Kind(
        lambda outs: 1,
        lambda modes, ranks: [(mode, ranks[0]) for mode in modes],
        ("nr,dr->rnd", "nr,dr->rnd"),
        ("or->ro", "or,pr->rop"),
    ),
    "tucker": _Kind(
        lambda outs: 2 + outs,
        lambda modes, ranks: [ranks, *zip(modes, ranks, strict=True)],
        ("abr,na,db->rnd", "abrq,na,db->rqnd"),
        ("or->ro", "or,pq->rqop"),
    ),
    "tt": _Kind(
        lambda outs: 1 + outs,
        lambda modes, ranks: list(zip((1, *ranks), modes, (*ranks, 1), strict=True)),
        ("xna,adr->rnd", "xna,adr->rnd"),
        ("rox->ro", "rob,bpx->rop"),
    ),
}


def _heads(generators: Sequence[int]) -> Iterator[tuple[_Kind, Shape, list[Shape]]]:
    """The kind of each head, its output modes, and the shapes of its tensors, gate and bias included."""
    num_streams, dim, _, *numbers = generators
    for _ in range(3):
        code, count, *numbers = numbers
        kind = _KINDS[GENERATOR_KINDS[code]]
        outs, ranks = tuple(numbers[:count]), tuple(numbers[count : count + kind.num_ranks(count)])
        numbers = numbers[count + len(ranks) :]
        yield kind, outs, [*kind.shapes((num_streams, dim, *outs), ranks), (1,), outs]


def _gains(generators: Sequence[int]) -> list[Shape]:
    """The shapes of the gain's tensors, by its code (`temper.norm.GAINS`)."""
    n, dim, code, *_ = generators
    forms: tuple[list[Shape], ...] = ([(n, dim)], [(n,), (dim,)], [(dim,)], [])
    return forms[code]


class Case(NamedTuple):
    """The tensors of a site, and gradients of what they are folded to."""

    generators: tuple[int, ...]
    raw: list[Tensor]
    grads: list[Tensor]

    def cpu(self) -> Case:
        return Case(self.generators, *([tensor.cpu() for tensor in group] for group in self[1:]))


def definition_of(raw: Sequence[Tensor], generators: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """in_map, out and bias of raw weights."""
    count = len(_gains(generators))
    gains, tensors = raw[:count], iter(raw[count:])
    in_maps, outs, biases = [], [], []
    for kind, modes, shapes in _heads(generators):
        *stored, gate, bias = (next(tensors) for _ in shapes)
        equation = kind.in_maps[len(modes) - 1]
        used = equation.count(",") + 1
        in_map = torch.einsum(equation, *stored[:used]).reshape(-1, *generators[:2])
        if kind.out_maps is None:
            in_map = in_map * gate
        else:
            outs.append((gate * torch.einsum(kind.out_maps[len(modes) - 1], *stored[used:])).flatten())
        in_maps.append(in_map)
        biases.append(bias.flatten())
    in_map = torch.cat(in_maps)
    if gains:
        in_map = in_map * (torch.outer(*gains) if len(gains) == 2 else gains[0])
    return in_map, torch.cat(outs) if outs else in_map.new_empty(0), torch.cat(biases)


def random_case(generators: Sequence[int], dtype: torch.dtype, device: torch.device, seed: int = 0) -> Case:
    """Tensors and gradients of order one."""
    source = torch.Generator().manual_seed(seed)

    def normal(shape: Shape) -> Tensor:
        return torch.randn(shape, generator=source, dtype=torch.float64).to(device, dtype)

    shapes = _gains(generators) + [shape for *_, shapes in _heads(generators) for shape in shapes]
    raw = [normal(shape) for shape in shapes]
    with torch.device("meta"):
        made = definition_of([torch.empty(shape) for shape in shapes], generators)
    return Case(tuple(generators), raw, [normal(tuple(part.shape)) for part in made])


def results(case: Case) -> dict[str, Tensor]:
    """The kernels' results for a case."""
    made = [torch.full_like(part, math.nan) for part in case.grads]
    slopes = [torch.full_like(tensor, math.nan) for tensor in case.raw]
    fold_launch.fold(case.raw, case.generators, made)
    d_in, d_out, d_bias = case.grads
    fold_launch.fold_backward(d_in, d_out, d_bias, case.raw, case.generators, slopes)
    return _named(made, slopes)


def definition(case: Case) -> dict[str, Tensor]:
    """The same in float64, differentiated by autograd."""
    with torch.enable_grad():
        raw = [tensor.double().requires_grad_() for tensor in case.raw]
        made = definition_of(raw, case.generators)
        pairs = [(part, grad.double()) for part, grad in zip(made, case.grads, strict=True) if part.requires_grad]
        outputs, cotangents = zip(*pairs, strict=True)
        found = torch.autograd.grad(outputs, raw, cotangents, allow_unused=True)
    slopes = [torch.zeros_like(leaf) if slope is None else slope for leaf, slope in zip(raw, found, strict=True)]
    return _named([part.detach() for part in made], slopes)


def _named(made: Sequence[Tensor], slopes: Sequence[Tensor]) -> dict[str, Tensor]:
    names = ["folded in_map", "folded out", "folded bias", *(f"d_raw[{k}]" for k in range(len(slopes)))]
    return dict(zip(names, [*made, *slopes], strict=True))
