"""The operations of a site as launches of kernels: what is allocated, how work is cut, which kernel runs.

Nothing here imports triton. A launch names its kernel, so that it can be run, compiled ahead of time for a GPU that is
not there, or only counted: `recorded` collects launches instead of running them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from temper.ops.gpu import tiles
from temper.ops.plan import FoldedWeights, MixerSpec, Routed, SiteSpec

MAX_STREAMS = 16
# 6! permutations; the code for 7! would take minutes to compile and would not stay in registers.
MAX_LOGITS = 1024
STORED = (torch.float32, torch.bfloat16)
# Features that one program projects; the sums of a token follow from its own size alone.
CHUNK = 2048
# As many programs as fill a large GPU a few times.
ENOUGH = 528
# Rows of the maps that one product takes at most: with more, kernels run out of registers.
MAX_ROWS = 32
# Rows that a backward product takes: it has to hold them for all streams at once.
ROWS_BACK = 16
# Entries in a row of the table of permutations, as in `kernels.mixers`.
WIDTH = 8


class Launch(NamedTuple):
    """A kernel launch.

    Args:
        kernel: its name.
        arguments: by name, in the order in which the kernel takes them; dtypes and mixers by name too.
    """

    kernel: str
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    warps: int
    stages: int


_recording: list[Launch] | None = None

# The number of shares of the tokens set by `two_shares`.
_num_shares: ContextVar[int | None] = ContextVar("_num_shares", default=None)


@contextmanager
def two_shares() -> Iterator[None]:
    """Cuts tokens into two shares inside, so that a few hundred already take several tiles each, as many do outside."""
    before = _num_shares.set(2)
    try:
        yield
    finally:
        _num_shares.reset(before)


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Collects the launches inside instead of running them; tensors may be on the meta device."""
    global _recording
    before, _recording = _recording, []
    try:
        yield _recording
    finally:
        _recording = before


def run(launch: Launch) -> None:
    """Runs or records a kernel launch."""
    if _recording is not None:
        _recording.append(launch)
        return
    kernel, arguments = resolve(launch)
    with _current(launch.arguments):
        kernel[launch.grid](**arguments, num_warps=launch.warps, num_stages=launch.stages)


def _current(arguments: dict[str, Any]) -> AbstractContextManager[Any]:
    """Makes the GPU of the arguments the current one, on which triton launches."""
    for value in arguments.values():
        if isinstance(value, Tensor):
            is_elsewhere = value.is_cuda and value.device.index != torch.cuda.current_device()
            return torch.cuda.device(value.device) if is_elsewhere else nullcontext()
    raise AssertionError("a kernel without tensors")


def resolve(launch: Launch) -> tuple[Any, dict[str, Any]]:
    """The kernel itself, and its arguments with names replaced by what triton knows."""
    from temper.ops.gpu.kernels import KERNELS, mixers, wide_types

    arguments = dict(launch.arguments)
    for name, index in (("SOLVE", 0), ("VJP", 1)):
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
    """The parameters common to all launches of a site."""

    spec: SiteSpec
    tokens: int
    padded: int
    half: bool
    wide: torch.dtype
    exact: str
    target: str

    @classmethod
    def of(cls, streams: Tensor, wide: torch.dtype, spec: SiteSpec) -> _Site:
        target = tiles.target_of(streams.device)
        exact = _exact(streams.dtype, target)
        half = streams.dtype == torch.bfloat16
        return cls(spec, len(streams), power(spec.num_streams, 2), half, wide, exact, target)

    def tile(self, name: str) -> tiles.Tile:
        return tiles.tile(name, self.padded, self.target, not self.half)

    def fits(self, name: str) -> bool:
        return tiles.fits(name, self.padded, self.target, not self.half)

    @property
    def row_block(self) -> int:
        """Rows of the maps in one product."""
        return min(MAX_ROWS, power(self.spec.num_rows, 16))

    def run(self, kernel: str, grid: tuple[int, ...], tile: tiles.Tile, arguments: dict[str, Any]) -> None:
        run(Launch(kernel, grid, arguments, tile.warps, tile.stages))


@lru_cache(maxsize=1024)
def _heads(spec: SiteSpec) -> dict[str, tuple[Any, ...]]:
    """The constants of heads; see `kernels.routing`."""
    heads, row, place, logit = [], 0, 0, 0
    parts = zip(spec.rows, spec.direct, spec.head_logits, spec.map_sizes, strict=True)
    for rows, direct, count, size in parts:
        heads.append((row, rows, place, logit, count, direct))
        row, place, logit = row + rows, place + size, logit + count
    padded = tuple(1 if direct else power(rows) for rows, direct in zip(spec.rows, spec.direct, strict=True))
    return {"PRE": heads[0], "RES": heads[1], "POST": heads[2], "RP": padded}


@lru_cache(maxsize=1024)
def _mixer(spec: SiteSpec, dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    """The constants of the mixer; see `kernels.mixers`."""
    native = spec.mixer
    assert native is not None
    n, count = spec.num_streams, spec.num_logits
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
        [*permutation, *[0] * (WIDTH - size)] for size in factors for permutation in itertools.permutations(range(size))
    ]
    return torch.tensor(rows, dtype=torch.int8, device=device)


def _routed(
    kernel: str, site: _Site, native: MixerSpec, device: torch.device
) -> tuple[tiles.Tile, Tensor | None, dict[str, Any]]:
    """The tile of a kernel with a mixer in it, the mixer's table and its constants."""
    constants = _mixer(site.spec, site.wide)
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
    arguments: dict[str, Any] = {
        "maps": flat,
        "parts": parts,
        "SIZE": flat.numel(),
        "WIDE": site.wide,
        "BLOCK": tile.tokens,
    }
    site.run("split_maps", (cdiv(flat.numel(), tile.tokens),), tile, arguments)
    return parts


def begin(streams: Tensor, folded: FoldedWeights, spec: SiteSpec) -> tuple[Tensor, Routed]:
    """x, and the routing with what is saved for the backward."""
    streams = streams.contiguous()
    site = _Site.of(streams, folded.bias.dtype, spec)
    tokens, features = len(streams), spec.num_streams * spec.dim
    maps = _maps(folded.in_map, site)
    splits, row_blocks = cdiv(features, CHUNK), cdiv(spec.num_rows, site.row_block)
    tile = site.tile("project")
    parts, squares = folded.bias.new_empty(splits, tokens, spec.num_rows), folded.bias.new_empty(splits, tokens)
    arguments: dict[str, Any] = {"streams": streams, "maps": maps, "z": parts, "squares": squares}
    arguments |= {
        "T": tokens,
        "R": spec.num_rows,
        "F": features,
        "BLOCKS": row_blocks,
        "CHUNK": CHUNK,
        "HALF": site.half,
        "WIDE": site.wide,
    }
    arguments |= {"EXACT": site.exact, "BT": tile.tokens, "BF": tile.features, "RP": site.row_block}
    if tokens:
        site.run("project", (cdiv(tokens, tile.tokens) * row_blocks, splits), tile, arguments)
    return _route(streams, parts, squares, folded, site)


def _route(
    streams: Tensor, parts: Tensor, squares: Tensor, folded: FoldedWeights, site: _Site
) -> tuple[Tensor, Routed]:
    """The second half of `begin`, from what was projected."""
    spec, tokens = site.spec, len(streams)
    new, native = folded.bias.new_empty, spec.mixer
    assert native is not None
    x = streams.new_empty(tokens, spec.dim)
    routed = Routed(new(tokens, spec.num_weights), new(tokens, spec.num_rows), new(tokens, 2))
    if not tokens:
        return x, routed
    tile, table, constants = _routed("route", site, native, streams.device)
    arguments: dict[str, Any] = {
        "parts": parts,
        "squares": squares,
        "out": folded.out.contiguous(),
        "bias": folded.bias.contiguous(),
    }
    arguments |= {"table": table, "z": routed.z, "norms": routed.norms, "weights": routed.weights}
    arguments |= {"T": tokens, "S": len(parts), "R": spec.num_rows, "F": spec.num_streams * spec.dim}
    arguments |= {"NORM_EPS": spec.norm_eps, "CLAMP": spec.norm_clamp, "PRE_EPS": spec.pre_eps}
    arguments |= {**_heads(spec), "SOLVE": native.kind, **constants}
    arguments |= {"N": spec.num_streams, "NP": site.padded, "WIDE": site.wide, "BT": tile.tokens}
    site.run("route", (cdiv(tokens, tile.tokens),), tile, arguments)
    tile = site.tile("read")
    arguments = {"streams": streams, "weights": routed.weights, "x": x, "T": tokens, "D": spec.dim}
    arguments |= {"N": spec.num_streams, "WIDE": site.wide, "BT": tile.tokens, "BD": tile.features}
    site.run("read", (cdiv(tokens, tile.tokens), cdiv(spec.dim, tile.features)), tile, arguments)
    return x, routed


def finish(target: Tensor, streams: Tensor, y: Tensor, weights: Tensor, spec: SiteSpec) -> None:
    """The next streams into `target`, which may be the streams."""
    streams, y, weights = streams.contiguous(), y.contiguous(), weights.contiguous()
    if not len(streams):
        return
    site = _Site.of(streams, weights.dtype, spec)
    tile = site.tile("write")
    arguments: dict[str, Any] = {
        "streams": streams,
        "y": y,
        "weights": weights,
        "out": target,
        "T": len(streams),
        "D": spec.dim,
    }
    arguments["N"] = spec.num_streams
    grid = (cdiv(len(streams), tile.tokens), cdiv(spec.dim, tile.features))
    if site.padded <= 8:
        arguments |= {"WIDE": site.wide, "BT": tile.tokens, "BD": tile.features}
        site.run("write", grid, tile, arguments)
    else:
        arguments |= {"NP": site.padded, "HALF": site.half, "WIDE": site.wide, "EXACT": site.exact}
        site.run("write_rows", grid, tile, arguments | {"BT": tile.tokens, "BD": tile.features})


def finish_backward(grad: Tensor, streams: Tensor, y: Tensor, weights: Tensor, spec: SiteSpec) -> tuple[Tensor, Tensor]:
    """The gradients of y and of the routing weights."""
    grad, streams, y, weights = (tensor.contiguous() for tensor in (grad, streams, y, weights))
    d_y, d_weights = torch.empty_like(y), torch.empty_like(weights)
    if not len(streams):
        return d_y, d_weights
    site = _Site.of(streams, weights.dtype, spec)
    tile = site.tile("write_backward")
    arguments: dict[str, Any] = {
        "grad": grad,
        "streams": streams,
        "y": y,
        "weights": weights,
        "d_y": d_y,
        "d_weights": d_weights,
    }
    arguments |= {"T": len(streams), "D": spec.dim, "N": spec.num_streams}
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
    folded: FoldedWeights,
    routed: Routed,
    spec: SiteSpec,
) -> tuple[Tensor, FoldedWeights]:
    """The gradients of the streams and of the folded weights."""
    streams, routed = streams.contiguous(), Routed(*(tensor.contiguous() for tensor in routed))
    d_streams = torch.empty_like(streams)
    if not len(streams):
        return d_streams, FoldedWeights(*(torch.zeros_like(part) for part in folded[:3]))
    site = _Site.of(streams, folded.bias.dtype, spec)
    d_x = None if d_x is None else d_x.contiguous()
    d_logits, d_z, own = _route_backward(d_x, d_weights, streams, folded, routed, site)
    tile = site.tile("streams_backward")
    parts: Tensor | None = None
    tokens, per = len(streams), 1
    shares = cdiv(tokens, tile.tokens)
    if spec.num_rows <= ROWS_BACK and site.padded <= 8:
        # The gradient of in_map in the same pass: its sums take the registers of half the features.
        tile = tile._replace(features=max(16, tile.features // 2))
        per, shares = _shares(tokens, tile.tokens, cdiv(spec.dim, tile.features))
        parts = folded.bias.new_empty(shares, *folded.in_map.shape)
    arguments: dict[str, Any] = {
        "grad": None if grad is None else grad.contiguous(),
        "d_x": d_x,
        "d_z": d_z,
        "own": own,
    }
    arguments |= {
        "streams": streams,
        "maps": _maps(folded.in_map, site),
        "weights": routed.weights,
        "d_streams": d_streams,
        "parts": parts,
    }
    arguments |= {"T": tokens, "D": spec.dim, "R": spec.num_rows, "TILES": per}
    arguments |= {"HAS_GRAD": grad is not None, "HAS_X": d_x is not None, "HAS_PARTS": parts is not None}
    arguments |= {"N": spec.num_streams, "NP": site.padded, "HALF": site.half, "WIDE": site.wide, "EXACT": site.exact}
    arguments |= {"BT": tile.tokens, "BD": tile.features, "RP": ROWS_BACK}
    site.run("streams_backward", (shares, cdiv(spec.dim, tile.features)), tile, arguments)
    if parts is None:
        parts = _map_shares(d_z, streams, folded, site)
    return d_streams, FoldedWeights(parts.sum(0), *_head_gradients(d_logits, folded, routed, site))


def _route_backward(
    d_x: Tensor | None,
    d_weights: Tensor | None,
    streams: Tensor,
    folded: FoldedWeights,
    routed: Routed,
    site: _Site,
) -> tuple[Tensor, Tensor, Tensor]:
    """d_logits (T, L), d_z (T, R) and the factor of the streams in their own gradient (T)."""
    spec, tokens, new = site.spec, len(streams), folded.bias.new_empty
    native = spec.mixer
    assert native is not None
    d_pre = None
    if d_x is not None:
        d_pre, tile = new(tokens, spec.num_streams), site.tile("read_backward")
        arguments: dict[str, Any] = {"d_x": d_x, "streams": streams, "d_pre": d_pre, "T": tokens, "D": spec.dim}
        arguments |= {"N": spec.num_streams, "WIDE": site.wide, "BT": tile.tokens, "BD": tile.features}
        site.run("read_backward", (cdiv(tokens, tile.tokens),), tile, arguments)
    d_logits, d_z, own = new(tokens, sum(spec.head_logits)), torch.empty_like(routed.z), new(tokens)
    tile, table, constants = _routed("route_backward", site, native, streams.device)
    arguments = {"d_weights": None if d_weights is None else d_weights.contiguous(), "d_pre": d_pre}
    arguments |= {**routed._asdict(), "out": folded.out.contiguous()}
    arguments |= {"bias": folded.bias.contiguous(), "table": table, "d_logits": d_logits, "d_z": d_z, "own": own}
    arguments |= {"T": tokens, "R": spec.num_rows, "HAS_WEIGHTS": d_weights is not None, "HAS_X": d_x is not None}
    arguments |= {"PRE_EPS": spec.pre_eps, **_heads(spec), "VJP": native.kind, **constants}
    arguments |= {"N": spec.num_streams, "NP": site.padded, "WIDE": site.wide, "BT": tile.tokens}
    site.run("route_backward", (cdiv(tokens, tile.tokens),), tile, arguments)
    return d_logits, d_z, own


def _map_shares(d_z: Tensor, streams: Tensor, folded: FoldedWeights, site: _Site) -> Tensor:
    """The gradient of in_map in shares of the tokens, as many as follow from the shape."""
    spec, tokens = site.spec, len(streams)
    features, tile = spec.num_streams * spec.dim, site.tile("maps_backward")
    columns, row_blocks = cdiv(features, tile.features), cdiv(spec.num_rows, site.row_block)
    per, shares = _shares(tokens, tile.tokens, columns * row_blocks)
    parts = folded.bias.new_empty(shares, *folded.in_map.shape)
    arguments: dict[str, Any] = {
        "d_z": d_z,
        "streams": streams,
        "parts": parts,
        "T": tokens,
        "R": spec.num_rows,
        "F": features,
    }
    arguments |= {"TILES": per, "BLOCKS": row_blocks, "HALF": site.half, "WIDE": site.wide, "EXACT": site.exact}
    arguments |= {"BT": tile.tokens, "BF": tile.features, "RP": site.row_block}
    site.run("maps_backward", (columns * row_blocks, shares), tile, arguments)
    return parts


def _head_gradients(d_logits: Tensor, folded: FoldedWeights, routed: Routed, site: _Site) -> tuple[Tensor, Tensor]:
    """The gradients of the output maps and the biases."""
    spec, tokens, new = site.spec, len(d_logits), folded.bias.new_empty
    # Without output maps there are only the biases: no row but that of ones.
    rows = spec.num_rows if folded.out.numel() else 0
    tile, logits = site.tile("heads_backward"), d_logits.shape[1]
    block = min(32, power(rows + 1, 16))
    grid = (cdiv(rows + 1, block), cdiv(logits, tile.features))
    per, shares = _shares(tokens, tile.tokens, 4 * grid[0] * grid[1])
    small = new(shares, rows + 1, logits)
    arguments: dict[str, Any] = {"z": routed.z if rows else routed.norms, "norms": routed.norms}
    arguments |= {"d_logits": d_logits, "parts": small}
    arguments |= {"T": tokens, "R": rows, "L": logits, "TILES": per, "WIDE": site.wide, "EXACT": "ieee"}
    arguments |= {"BT": tile.tokens, "BR": block, "BL": tile.features}
    site.run("heads_backward", (*grid, shares), tile, arguments)
    d_out, d_bias = torch.empty_like(folded.out), torch.empty_like(folded.bias)
    heads = {name: _heads(spec)[name] for name in ("PRE", "RES", "POST")}
    arguments = {"parts": small, "d_out": d_out, "d_bias": d_bias, "P": shares, "R": rows, "L": logits}
    arguments |= {**heads, "WIDE": site.wide, "LP": power(logits)}
    run(Launch("add_heads", (rows + 1,), arguments, 4, 1))
    return d_out, d_bias


def _shares(tokens: int, block: int, programs: int) -> tuple[int, int]:
    """Tiles of tokens for each share, and how many shares there are, for some `programs` that share nothing."""
    count = cdiv(tokens, block)
    per = cdiv(count, min(count, _num_shares.get() or max(1, cdiv(ENOUGH, programs))))
    return per, cdiv(count, per)


def finish_begin(
    target: Tensor, streams: Tensor, y: Tensor, weights: Tensor, folded: FoldedWeights, spec: SiteSpec
) -> tuple[Tensor, Routed]:
    """`finish` of one site into `target`, which may be the streams, and `begin` of the next."""
    streams, y, weights = streams.contiguous(), y.contiguous(), weights.contiguous()
    site = _Site.of(streams, weights.dtype, spec)
    if spec.num_rows > MAX_ROWS or not len(streams) or not site.fits("write_project"):
        # This many rows would not fit beside the streams.
        finish(target, streams, y, weights, spec)
        return begin(target, folded, spec)
    tokens, tile, chunk = len(streams), site.tile("write_project"), CHUNK // site.padded
    splits = cdiv(spec.dim, chunk)
    parts, squares = weights.new_empty(splits, tokens, spec.num_rows), weights.new_empty(splits, tokens)
    arguments: dict[str, Any] = {
        "streams": streams,
        "y": y,
        "weights": weights,
        "maps": _maps(folded.in_map, site),
        "out": target,
    }
    arguments |= {"z": parts, "squares": squares, "T": tokens, "D": spec.dim, "R": spec.num_rows, "CHUNK": chunk}
    arguments |= {"N": spec.num_streams, "NP": site.padded, "HALF": site.half, "WIDE": site.wide, "EXACT": site.exact}
    # At 16 streams fewer rows would not share the product among all warps, and it would spill.
    rows = MAX_ROWS if site.padded > 8 else site.row_block
    arguments |= {"BT": tile.tokens, "BD": tile.features, "RP": rows}
    site.run("write_project", (cdiv(tokens, tile.tokens), splits), tile, arguments)
    return _route(target, parts, squares, folded, site)


def finish_begin_backward(
    grad: Tensor | None,
    d_x: Tensor | None,
    d_next_weights: Tensor | None,
    following: Tensor,
    folded: FoldedWeights,
    routed: Routed,
    streams: Tensor,
    y: Tensor,
    weights: Tensor,
    spec: SiteSpec,
) -> tuple[Tensor, FoldedWeights, Tensor, Tensor]:
    """The gradients of the next streams, of the folded weights, of y and of the earlier site's weights."""
    following, streams, y, weights = (tensor.contiguous() for tensor in (following, streams, y, weights))
    if not len(streams):
        d_next, d_folded = begin_backward(grad, d_x, d_next_weights, following, folded, routed, spec)
        return d_next, d_folded, torch.empty_like(y), torch.empty_like(weights)
    routed = Routed(*(tensor.contiguous() for tensor in routed))
    site = _Site.of(streams, folded.bias.dtype, spec)
    if not site.fits("streams_write_backward"):
        d_next, d_folded = begin_backward(grad, d_x, d_next_weights, following, folded, routed, spec)
        return d_next, d_folded, *finish_backward(d_next, streams, y, weights, spec)
    d_x = None if d_x is None else d_x.contiguous()
    d_logits, d_z, own = _route_backward(d_x, d_next_weights, following, folded, routed, site)
    d_next, d_y, d_weights = torch.empty_like(streams), torch.empty_like(y), torch.empty_like(weights)
    tile = site.tile("streams_write_backward")
    arguments: dict[str, Any] = {
        "grad": None if grad is None else grad.contiguous(),
        "d_x": d_x,
        "d_z": d_z,
        "own": own,
    }
    arguments |= {"following": following, "maps": _maps(folded.in_map, site), "next_weights": routed.weights}
    arguments |= {"d_next": d_next, "streams": streams, "y": y, "weights": weights, "d_y": d_y, "d_weights": d_weights}
    arguments |= {"T": len(streams), "D": spec.dim, "R": spec.num_rows}
    arguments |= {"HAS_GRAD": grad is not None, "HAS_X": d_x is not None, "N": spec.num_streams, "NP": site.padded}
    arguments |= {"HALF": site.half, "WIDE": site.wide, "EXACT": site.exact}
    arguments |= {"BT": tile.tokens, "BD": tile.features, "RP": ROWS_BACK}
    site.run("streams_write_backward", (cdiv(len(streams), tile.tokens),), tile, arguments)
    d_in_map = _map_shares(d_z, following, folded, site).sum(0)
    return d_next, FoldedWeights(d_in_map, *_head_gradients(d_logits, folded, routed, site)), d_y, d_weights


def mix(logits: Tensor, spec: SiteSpec) -> Tensor:
    """res (T, N, N) of logits (T, *logit_shape)."""
    logits = logits.contiguous()
    res = logits.new_empty(len(logits), spec.num_streams, spec.num_streams)
    _run_mixer("mix", {"logits": logits, "res": res}, "SOLVE", spec)
    return res


def mix_backward(logits: Tensor, res: Tensor, grad: Tensor, spec: SiteSpec) -> Tensor:
    """The gradient of the logits."""
    logits, res, grad = logits.contiguous(), res.contiguous(), grad.contiguous()
    d_logits = torch.empty_like(logits)
    _run_mixer("mix_backward", {"logits": logits, "res": res, "grad": grad, "d_logits": d_logits}, "VJP", spec)
    return d_logits


def _run_mixer(kernel: str, tensors: dict[str, Tensor], function: str, spec: SiteSpec) -> None:
    logits, native = tensors["logits"], spec.mixer
    assert native is not None
    if not logits.numel() and not len(logits):
        return
    site = _Site.of(logits, torch.promote_types(logits.dtype, torch.float32), spec)
    tile, table, constants = _routed(kernel.replace("mix", "route"), site, native, logits.device)
    arguments: dict[str, Any] = {**tensors, "table": table, "T": len(logits), function: native.kind, **constants}
    arguments |= {"N": spec.num_streams, "NP": site.padded, "WIDE": site.wide, "BT": tile.tokens}
    site.run(kernel, (cdiv(len(logits), tile.tokens),), tile, arguments)
