"""The operations of a site as launches of kernels: what is allocated, how work is cut, which kernel runs.

Nothing here imports triton. A launch names its kernel, so that it can be run, compiled ahead of time for a GPU that is
not there, or only counted: `recorded` collects launches instead of running them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from temper.ops.fused import Begun
from temper.ops.gpu import tiles
from temper.ops.plan import Fold, Native, Plan

MAX_STREAMS = 16
# 6! permutations; the code for 7! would take minutes to compile and would not stay in registers.
MAX_LOGITS = 1024
STORED = (torch.float32, torch.bfloat16)
# Features that one program projects; the sums of a token follow from its own size alone.
CHUNK = 2048
# As many programs as fill a large GPU a few times.
ENOUGH = 528
# Rows of the maps that one product takes at most.
MAX_ROWS = 64
# Entries in a row of the table of permutations, as in `kernels.mixers`.
WIDTH = 8


class Launch(NamedTuple):
    """A kernel to be run.

    Args:
        kernel: its name.
        arguments: by name, in the order in which the kernel takes them; dtypes and mixers by name too.
        reads: how often a tensor is read from memory, where that is not once.
    """

    kernel: str
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    warps: int
    stages: int
    reads: dict[str, int] = {}


_recording: list[Launch] | None = None


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Launches inside are collected, not run; tensors may be on the meta device."""
    global _recording
    before, _recording = _recording, []
    try:
        yield _recording
    finally:
        _recording = before


def _run(launch: Launch) -> None:
    if _recording is not None:
        _recording.append(launch)
        return
    kernel, arguments = resolve(launch)
    kernel[launch.grid](**arguments, num_warps=launch.warps, num_stages=launch.stages)


def resolve(launch: Launch) -> tuple[Any, dict[str, Any]]:
    """The kernel itself, and its arguments with names replaced by what triton knows."""
    from temper.ops.gpu.kernels import KERNELS, mixers, wide_types

    arguments = dict(launch.arguments)
    for name, index in (("SOLVE", 0), ("PULL", 1)):
        if name in arguments:
            arguments[name] = mixers.MIXERS[arguments[name]][index]
    if "WIDE" in arguments:
        arguments["WIDE"] = wide_types[arguments["WIDE"]]
    return KERNELS[launch.kernel], arguments


def power(number: int, least: int = 1) -> int:
    """The next power of two."""
    return max(least, 1 << max(0, number - 1).bit_length())


def cdiv(number: int, by: int) -> int:
    return -(-number // by)


def _exact(dtype: torch.dtype, target: str) -> str:
    # Three products in TF32 are as good as one in float32; AMD has float32 itself.
    return "tf32x3" if dtype == torch.float32 and target.startswith("sm_") else "ieee"


class _Site(NamedTuple):
    """What every launch of a site needs."""

    plan: Plan
    tokens: int
    padded: int
    half: bool
    wide: torch.dtype
    exact: str
    target: str

    @classmethod
    def of(cls, streams: Tensor, wide: torch.dtype, plan: Plan) -> _Site:
        target = tiles.target_of(streams.device)
        exact = _exact(streams.dtype, target)
        half = streams.dtype == torch.bfloat16
        return cls(plan, len(streams), power(plan.num_streams, 2), half, wide, exact, target)

    def tile(self, name: str) -> tiles.Tile:
        return tiles.tile(name, self.padded, self.target, not self.half)

    @property
    def rows(self) -> int:
        return sum(self.plan.rows)

    @property
    def row_block(self) -> int:
        """Rows of the maps in one product."""
        return min(MAX_ROWS, power(self.rows, 16))

    def run(
        self, kernel: str, grid: tuple[int, ...], tile: tiles.Tile, arguments: dict[str, Any], reads: Any = None
    ) -> None:
        _run(Launch(kernel, grid, arguments, tile.warps, tile.stages, reads or {}))


@lru_cache(maxsize=1024)
def _heads(plan: Plan) -> dict[str, tuple[Any, ...]]:
    """The constants of heads; see `kernels.routing`."""
    heads, row, place, logit = [], 0, 0, 0
    parts = zip(plan.rows, plan.direct, plan.logits_of, plan.map_sizes, strict=True)
    for rows, direct, count, size in parts:
        heads.append((row, rows, place, logit, count, direct))
        row, place, logit = row + rows, place + size, logit + count
    padded = tuple(1 if direct else power(rows) for rows, direct in zip(plan.rows, plan.direct, strict=True))
    return {"PRE": heads[0], "RES": heads[1], "POST": heads[2], "RP": padded}


@lru_cache(maxsize=1024)
def _mixer(plan: Plan, dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    """The constants of the mixer; see `kernels.mixers`."""
    native = plan.native
    assert native is not None
    n, count = plan.num_streams, plan.logits
    matrix = count == n * n and not native.factors and count > 0
    padded = power(n, 2) ** 2 if matrix else power(count)
    tol = native.tol or (0.0 if native.kind != "newton" else 2e-6 if dtype == torch.float32 else 1e-12)
    factors: list[int] = []
    start, inner = 0, 1
    for size in native.factors:
        factors += [size, math.factorial(size), start, inner]
        start, inner = start + math.factorial(size), inner * size
    settings = (native.iters, 1 if native.last_columns else 2, tol, native.eps, tuple(factors))
    return {"MIXER": (count, padded, matrix), "SETTINGS": settings}


@cache
def _table(factors: tuple[int, ...], device: torch.device) -> Tensor | None:
    """Every permutation of every factor, in the order of the logits: (L, WIDTH)."""
    if not factors:
        return None
    rows = [
        [*permutation, *[0] * (WIDTH - size)]
        for size in factors
        for permutation in itertools.permutations(range(size))
    ]
    return torch.tensor(rows, dtype=torch.int8, device=device)


def _routed(kernel: str, site: _Site, native: Native, device: torch.device) -> tuple[tiles.Tile, Tensor | None, dict[str, Any]]:
    """The tile of a kernel with a mixer in it, the mixer's table and its constants."""
    constants = _mixer(site.plan, site.wide)
    tile, logits = site.tile(kernel), constants["MIXER"][1]
    if logits > site.padded**2:
        # Many permutations: fewer tokens at once.
        tile = tile._replace(tokens=max(1, min(tile.tokens, MAX_LOGITS // logits)))
    return tile, _table(native.factors, device), constants


def _maps(in_map: Tensor, site: _Site) -> Tensor:
    """The maps as products take them: (R, F), or for bfloat16 streams in two parts (2, R, F)."""
    flat = in_map.contiguous().flatten(1)
    if not site.half:
        return flat
    parts = torch.empty((2, *flat.shape), dtype=torch.bfloat16, device=flat.device)
    tile = site.tile("split_maps")
    arguments = {"maps": flat, "parts": parts, "SIZE": flat.numel(), "WIDE": site.wide, "BLOCK": tile.tokens}
    site.run("split_maps", (cdiv(flat.numel(), tile.tokens),), tile, arguments)
    return parts


def begin(streams: Tensor, fold: Fold, plan: Plan) -> Begun:
    """x, the routing weights and what is kept for the backward."""
    streams = streams.contiguous()
    site = _Site.of(streams, fold.bias.dtype, plan)
    tokens, features = len(streams), plan.num_streams * plan.dim
    maps = _maps(fold.in_map, site)
    splits, tile = cdiv(features, CHUNK), site.tile("project")
    parts, squares = fold.bias.new_empty(splits, tokens, site.rows), fold.bias.new_empty(splits, tokens)
    arguments = {"streams": streams, "maps": maps, "z": parts, "squares": squares}
    arguments |= {"T": tokens, "R": site.rows, "F": features, "CHUNK": CHUNK, "HALF": site.half, "WIDE": site.wide}
    arguments |= {"EXACT": site.exact, "BT": tile.tokens, "BF": tile.features, "RP": site.row_block}
    row_blocks = cdiv(site.rows, site.row_block)
    if tokens:
        grid = (cdiv(tokens, tile.tokens), splits, row_blocks)
        site.run("project", grid, tile, arguments, {"streams": row_blocks})
    return _route(streams, parts, squares, fold, site)


def _route(streams: Tensor, parts: Tensor, squares: Tensor, fold: Fold, site: _Site) -> Begun:
    """The second half of `begin`, from what was projected."""
    plan, tokens = site.plan, len(streams)
    new, native = fold.bias.new_empty, plan.native
    assert native is not None
    begun = Begun(streams.new_empty(tokens, plan.dim), new(tokens, plan.num_weights), new(tokens, site.rows), new(tokens, 2))
    if not tokens:
        return begun
    tile, table, constants = _routed("route", site, native, streams.device)
    arguments = {"parts": parts, "squares": squares, "out": fold.out.contiguous(), "bias": fold.bias.contiguous()}
    arguments |= {"table": table, "z": begun.z, "norms": begun.norms, "weights": begun.weights}
    arguments |= {"T": tokens, "S": len(parts), "R": site.rows, "F": plan.num_streams * plan.dim}
    arguments |= {"NORM_EPS": plan.norm_eps, "CLAMP": plan.norm_clamp, "PRE_EPS": plan.pre_eps}
    arguments |= {**_heads(plan), "SOLVE": native.kind, **constants}
    arguments |= {"N": plan.num_streams, "NP": site.padded, "WIDE": site.wide, "BT": tile.tokens}
    site.run("route", (cdiv(tokens, tile.tokens),), tile, arguments)
    tile = site.tile("read")
    arguments = {"streams": streams, "weights": begun.weights, "x": begun.x, "T": tokens, "D": plan.dim}
    arguments |= {"N": plan.num_streams, "WIDE": site.wide, "BT": tile.tokens, "BD": tile.features}
    site.run("read", (cdiv(tokens, tile.tokens), cdiv(plan.dim, tile.features)), tile, arguments)
    return begun


def finish(target: Tensor, streams: Tensor, y: Tensor, weights: Tensor, plan: Plan) -> None:
    """The next streams into `target`, which may be the streams."""
    streams, y, weights = streams.contiguous(), y.contiguous(), weights.contiguous()
    if not len(streams):
        return
    site = _Site.of(streams, weights.dtype, plan)
    tile = site.tile("write")
    arguments = {"streams": streams, "y": y, "weights": weights, "out": target, "T": len(streams), "D": plan.dim}
    arguments["N"] = plan.num_streams
    grid = (cdiv(len(streams), tile.tokens), cdiv(plan.dim, tile.features))
    if site.padded <= 8:
        arguments |= {"WIDE": site.wide, "BT": tile.tokens, "BD": tile.features}
        site.run("write", grid, tile, arguments)
    else:
        arguments |= {"NP": site.padded, "HALF": site.half, "WIDE": site.wide, "EXACT": site.exact}
        site.run("write_rows", grid, tile, arguments | {"BT": tile.tokens, "BD": tile.features})


def finish_backward(grad: Tensor, streams: Tensor, y: Tensor, weights: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """The gradients of y and of the routing weights."""
    grad, streams, y, weights = (tensor.contiguous() for tensor in (grad, streams, y, weights))
    d_y, d_weights = torch.empty_like(y), torch.empty_like(weights)
    if not len(streams):
        return d_y, d_weights
    site = _Site.of(streams, weights.dtype, plan)
    tile = site.tile("write_backward")
    arguments = {"grad": grad, "streams": streams, "y": y, "weights": weights, "d_y": d_y, "d_weights": d_weights}
    arguments |= {"T": len(streams), "D": plan.dim, "N": plan.num_streams}
    grid = (cdiv(len(streams), tile.tokens),)
    if site.padded <= 4:
        arguments |= {"WIDE": site.wide, "BT": tile.tokens, "BD": tile.features}
        site.run("write_backward", grid, tile, arguments)
    else:
        arguments |= {"NP": site.padded, "WIDE": site.wide, "EXACT": site.exact}
        site.run("write_backward_dot", grid, tile, arguments | {"BT": tile.tokens, "BD": tile.features})
    return d_y, d_weights


def begin_backward(
    grad: Tensor | None,
    d_x: Tensor | None,
    d_weights: Tensor | None,
    streams: Tensor,
    fold: Fold,
    weights: Tensor,
    z: Tensor,
    norms: Tensor,
    plan: Plan,
) -> tuple[Tensor, Fold]:
    """The gradients of the streams and of the folded weights."""
    streams, weights, z, norms = (tensor.contiguous() for tensor in (streams, weights, z, norms))
    d_streams = torch.empty_like(streams)
    if not len(streams):
        return d_streams, Fold(*(torch.zeros_like(part) for part in fold))
    site = _Site.of(streams, fold.bias.dtype, plan)
    d_x = None if d_x is None else d_x.contiguous()
    d_logits, d_z, own = _route_backward(d_x, d_weights, streams, fold, weights, z, norms, site)
    tile = site.tile("streams_backward")
    arguments = {"grad": None if grad is None else grad.contiguous(), "d_x": d_x, "d_z": d_z, "own": own}
    arguments |= {"streams": streams, "maps": _maps(fold.in_map, site), "weights": weights, "d_streams": d_streams}
    arguments |= {"T": len(streams), "D": plan.dim, "R": site.rows}
    arguments |= {"HAS_GRAD": grad is not None, "HAS_X": d_x is not None, "N": plan.num_streams, "NP": site.padded}
    arguments |= {"HALF": site.half, "WIDE": site.wide, "EXACT": site.exact}
    arguments |= {"BT": tile.tokens, "BD": tile.features, "RP": site.row_block}
    grid = (cdiv(len(streams), tile.tokens), cdiv(plan.dim, tile.features))
    site.run("streams_backward", grid, tile, arguments)
    return d_streams, _fold_gradients(d_logits, d_z, streams, fold, z, norms, site)


def _route_backward(
    d_x: Tensor | None,
    d_weights: Tensor | None,
    streams: Tensor,
    fold: Fold,
    weights: Tensor,
    z: Tensor,
    norms: Tensor,
    site: _Site,
) -> tuple[Tensor, Tensor, Tensor]:
    """d_logits (T, L), d_z (T, R) and the factor of the streams in their own gradient (T)."""
    plan, tokens, new = site.plan, len(streams), fold.bias.new_empty
    native = plan.native
    assert native is not None
    d_pre = None
    if d_x is not None:
        d_pre, tile = new(tokens, plan.num_streams), site.tile("read_backward")
        arguments: dict[str, Any] = {"d_x": d_x, "streams": streams, "d_pre": d_pre, "T": tokens, "D": plan.dim}
        arguments |= {"N": plan.num_streams, "WIDE": site.wide, "BT": tile.tokens, "BD": tile.features}
        site.run("read_backward", (cdiv(tokens, tile.tokens),), tile, arguments)
    d_logits, d_z, own = new(tokens, sum(plan.logits_of)), torch.empty_like(z), new(tokens)
    tile, table, constants = _routed("route_backward", site, native, streams.device)
    arguments = {"d_weights": None if d_weights is None else d_weights.contiguous(), "d_pre": d_pre}
    arguments |= {"weights": weights, "z": z, "norms": norms, "out": fold.out.contiguous()}
    arguments |= {"bias": fold.bias.contiguous(), "table": table, "d_logits": d_logits, "d_z": d_z, "own": own}
    arguments |= {"T": tokens, "R": site.rows, "HAS_WEIGHTS": d_weights is not None, "HAS_X": d_x is not None}
    arguments |= {"PRE_EPS": plan.pre_eps, **_heads(plan), "PULL": native.kind, **constants}
    arguments |= {"N": plan.num_streams, "NP": site.padded, "WIDE": site.wide, "BT": tile.tokens}
    site.run("route_backward", (cdiv(tokens, tile.tokens),), tile, arguments)
    return d_logits, d_z, own


def _fold_gradients(
    d_logits: Tensor, d_z: Tensor, streams: Tensor, fold: Fold, z: Tensor, norms: Tensor, site: _Site
) -> Fold:
    """The gradients of the folded weights: sums over all tokens, in shares that follow from the shape."""
    plan, tokens, new = site.plan, len(streams), fold.bias.new_empty
    features, tile = plan.num_streams * plan.dim, site.tile("maps_backward")
    columns, row_blocks = cdiv(features, tile.features), cdiv(site.rows, site.row_block)
    per, shares = _shares(tokens, tile.tokens, columns * row_blocks)
    parts = new(shares, *fold.in_map.shape)
    arguments = {"d_z": d_z, "streams": streams, "parts": parts, "T": tokens, "R": site.rows, "F": features}
    arguments |= {"TILES": per, "HALF": site.half, "WIDE": site.wide, "EXACT": site.exact}
    arguments |= {"BT": tile.tokens, "BF": tile.features, "RP": site.row_block}
    site.run("maps_backward", (columns, shares, row_blocks), tile, arguments, {"streams": row_blocks})
    # Without output maps there are only the biases: no row but that of ones.
    rows = site.rows if fold.out.numel() else 0
    tile, logits = site.tile("heads_backward"), d_logits.shape[1]
    block = min(32, power(rows + 1, 16))
    grid = (cdiv(rows + 1, block), cdiv(logits, tile.features))
    per, shares = _shares(tokens, tile.tokens, 4 * grid[0] * grid[1])
    small = new(shares, rows + 1, logits)
    arguments = {"z": z if rows else norms, "norms": norms, "d_logits": d_logits, "parts": small}
    arguments |= {"T": tokens, "R": rows, "L": logits, "TILES": per, "WIDE": site.wide, "EXACT": "ieee"}
    arguments |= {"BT": tile.tokens, "BR": block, "BL": tile.features}
    site.run("heads_backward", (*grid, shares), tile, arguments)
    total = small.sum(0)
    return Fold(parts.sum(0), _own_blocks(total, fold.out, plan), total[-1])


def _shares(tokens: int, block: int, programs: int) -> tuple[int, int]:
    """Tiles of tokens for each share, and how many shares there are, for some `programs` that share nothing."""
    count = cdiv(tokens, block)
    per = cdiv(count, min(count, max(1, cdiv(ENOUGH, programs))))
    return per, cdiv(count, per)


def _own_blocks(total: Tensor, out: Tensor, plan: Plan) -> Tensor:
    """Of rows times logits of all heads, (R + 1, L), those of the same head, as `Fold.out` has them."""
    if not out.numel():
        return torch.zeros_like(out)
    blocks = [
        total[rows[0] : rows[0] + rows[1], rows[3] : rows[3] + rows[4]].flatten()
        for rows in _heads(plan).values()
        if len(rows) == 6 and not rows[5]
    ]
    return torch.cat(blocks)


def mix(logits: Tensor, plan: Plan) -> Tensor:
    """res (T, N, N) of logits (T, *logit_shape)."""
    logits = logits.contiguous()
    res = logits.new_empty(len(logits), plan.num_streams, plan.num_streams)
    _run_mixer("mix", {"logits": logits, "res": res}, "SOLVE", plan)
    return res


def mix_backward(logits: Tensor, res: Tensor, grad: Tensor, plan: Plan) -> Tensor:
    """The gradient of the logits."""
    logits, res, grad = logits.contiguous(), res.contiguous(), grad.contiguous()
    d_logits = torch.empty_like(logits)
    _run_mixer("mix_backward", {"logits": logits, "res": res, "grad": grad, "d_logits": d_logits}, "PULL", plan)
    return d_logits


def _run_mixer(kernel: str, tensors: dict[str, Tensor], function: str, plan: Plan) -> None:
    logits, native = tensors["logits"], plan.native
    assert native is not None
    if not logits.numel() and not len(logits):
        return
    site = _Site.of(logits, logits.dtype, plan)
    tile, table, constants = _routed(kernel.replace("mix", "route"), site, native, logits.device)
    arguments: dict[str, Any] = {**tensors, "table": table, "T": len(logits), function: native.kind, **constants}
    arguments |= {"N": plan.num_streams, "NP": site.padded, "BT": tile.tokens}
    site.run(kernel, (cdiv(len(logits), tile.tokens),), tile, arguments)
