"""Bytes and launches of a site, counted without running anything, and a best-case estimate for GPUs.

Tensors are on the meta device. Every tensor that an operation or a kernel reads or writes counts once, as if caches
worked perfectly within an operation and not at all between operations; views and allocations do not count.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import temper
from temper.ops import fused
from temper.ops import gpu as gpu_kernels
from temper.ops.gpu import fold_launch, launch
from temper.ops.plan import FoldedWeights, SiteSpec
from temper_lab.method import Method, parse_all
from temper_lab.train.cluster import DEVICES, Device

TOKENS = 8192
WIDTHS = (768, 4096, 7168)
# A typical time to launch a kernel; the next launch overlaps with a running kernel.
LAUNCH_SECONDS = 4e-6
GPUS = ("A100", "H100", "B200")


class Total(NamedTuple):
    """The traffic of one site, forward and backward.

    Args:
        large: the bytes of tensors with features for every token; the rest is routing and weights.
    """

    bytes: int
    large: int
    launches: int


class _Operations(TorchDispatchMode):
    """Counts the torch operations that would launch a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.large = self.launches = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if not _is_free(function):
            self.launches += 1
            made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
            read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            # A filled tensor is written but not read.
            for tensor in made if "zeros" in function._schema.name else made + read:
                self.bytes += _size(tensor)
                self.large += _size(tensor) if _is_large(tensor) else 0
        return out


def _is_free(function: Any) -> bool:
    """True if an operation only makes a view, or only allocates memory."""
    schema = function._schema
    is_view = any(a.alias_info is not None and not a.alias_info.is_write for a in schema.arguments)
    return is_view or "empty" in schema.name or schema.name == "aten::_unsafe_view"


def _size(tensor: Tensor) -> int:
    """The bytes of a tensor's storage; expanded axes count once."""
    return tensor.element_size() * math.prod(
        size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride
    )


def _is_large(tensor: Tensor) -> bool:
    """True if a tensor has features for every token."""
    return tensor.numel() >= TOKENS * min(WIDTHS) and TOKENS in tensor.shape


def count(call: Callable[[], Any]) -> tuple[Any, Total]:
    """The result of a call and its traffic; launches may be recorded."""
    with launch.recorded() as launches, _Operations() as operations:
        result = call()
    moved, large = operations.bytes, operations.large
    for tensor in tree_leaves([entry.arguments for entry in launches]):
        if isinstance(tensor, Tensor):
            moved += _size(tensor)
            large += _size(tensor) if _is_large(tensor) else 0
    return result, Total(moved, large, operations.launches + len(launches))


def _add(totals: Iterable[Total]) -> Total:
    return Total(*map(sum, zip(*totals, strict=True)))


class _Site(NamedTuple):
    """A site on the meta device with its inputs and outputs."""

    router: temper.HyperConnection
    folded: FoldedWeights
    streams: Tensor
    y: Tensor

    @classmethod
    def make(cls, method: str, num_streams: int, dim: int) -> _Site:
        with torch.device("meta"):
            router = temper.HyperConnection(Method.parse(method).config(num_streams, dim))
            streams = torch.empty(TOKENS, num_streams, dim, dtype=torch.bfloat16)
            with torch.no_grad():
                folded = router.fold(torch.float32)
        return cls(router, folded, streams, streams[:, 0].contiguous())

    @property
    def spec(self) -> SiteSpec:
        assert self.router.spec is not None
        return self.router.spec

    def raw(self) -> list[Tensor]:
        router = self.router
        return [tensor for owner in (router.norm, router.pre, router.res, router.post) for tensor in owner.stored()]


@contextmanager
def _meta() -> Iterator[None]:
    with torch.device("meta"), torch.no_grad():
        yield


def fused_site(site: _Site) -> Total:
    """`fused`, with weights that torch folds under autograd."""
    spec, mixer, folded, streams, y = site.spec, site.router.mixer, site.folded, site.streams, site.y
    with _meta():
        (_, routed), first = count(lambda: fused.begin(streams, folded, spec, mixer))
        _, second = count(lambda: fused.finish(streams, y, routed.weights, spec))
        (_, slopes), third = count(lambda: fused.finish_backward(streams, streams, y, routed.weights, spec))
        _, fourth = count(lambda: fused.begin_backward(streams, y, slopes, streams, folded, routed, spec, mixer))
    return _add((first, second, third, fourth, _fold_in_torch(site)))


def _fold_in_torch(site: _Site) -> Total:
    def run() -> None:
        with torch.enable_grad():
            folded = site.router.fold(torch.float32)[:3]
            parts = [part for part in folded if part.requires_grad]
            torch.autograd.grad(parts, list(site.router.parameters()), [torch.empty_like(part) for part in parts])

    with torch.device("meta"):
        return count(run)[1]


def triton_site(site: _Site, chained: bool) -> Total:
    """`triton`: every site by itself, or finished together with the next one's begin."""
    spec, folded, streams, y = site.spec, site.folded, site.streams, site.y
    with _meta():
        (_, routed), begin = count(lambda: launch.begin(streams, folded, spec))
        weights = routed.weights
        if chained:
            _, forward = count(lambda: launch.finish_begin(streams, streams, y, weights, folded, spec))
            later, earlier = (streams, y, weights, streams, folded, routed), (streams, y, weights)
            _, backward = count(lambda: launch.finish_begin_backward(*later, *earlier, spec))
            parts = [forward, backward]
        else:
            _, finish = count(lambda: launch.finish(streams, streams, y, weights, spec))
            _, first = count(lambda: launch.finish_backward(streams, streams, y, weights, spec))
            _, second = count(lambda: launch.begin_backward(streams, y, weights, streams, folded, routed, spec))
            parts = [begin, finish, first, second]
        raw, generators = site.raw(), spec.generators
        assert generators is not None
        results = list(folded[:3])
        parts.append(count(lambda: fold_launch.fold(raw, generators, results))[1])
        parts.append(
            count(lambda: fold_launch.fold_backward(folded.in_map, folded.out, folded.bias, raw, generators, raw))[1]
        )
    return _add(parts)


def floors(num_streams: int) -> dict[str, int]:
    """The least possible units: every large tensor is read and written once per site, or per chained pair of halves."""
    return {"unchained": 8 * num_streams + 5, "chained": 6 * num_streams + 5}


def rows(
    methods: Iterable[str], streams: Iterable[int], widths: Iterable[int] = WIDTHS
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """One row for every method, number of streams, width and backend that the kernels support, and what they do not."""
    widths = tuple(widths)
    wanted: list[tuple[str, int, int]] = []
    skipped: list[dict[str, Any]] = []
    for method, num_streams in itertools.product(map(str, parse_all(methods)), tuple(streams)):
        reason = _unserved(method, num_streams, widths[0])
        if reason is None:
            wanted += [(method, num_streams, dim) for dim in widths]
        else:
            skipped.append({"method": method, "streams": num_streams, "reason": reason})
    if not wanted:
        reasons = "; ".join(left_out(skipped))
        raise ValueError(f"none of these runs on the GPU kernels, so there is nothing to count: {reasons}")
    found = []
    for method, num_streams, dim in wanted:
        site = _Site.make(method, num_streams, dim)
        unit = TOKENS * dim * 2
        ways = {
            "fused": fused_site(site),
            "triton": triton_site(site, False),
            "triton, chained": triton_site(site, True),
        }
        for backend, total in ways.items():
            row = {"method": method, "streams": num_streams, "dim": dim, "backend": backend}
            floor = floors(num_streams)["chained" if "chained" in backend else "unchained"]
            found.append(
                row | total._asdict() | {"units": total.bytes / unit, "of streams": total.large / unit, "floor": floor}
            )
    return found, skipped


def _unserved(method: str, num_streams: int, dim: int) -> str | None:
    """Why there is no such site on the GPU kernels; None if there is."""
    try:
        config = Method.parse(method).config(num_streams, dim)
        if config.is_residual:
            return "it is a plain residual connection"
        with torch.device("meta"):
            router = temper.HyperConnection(config)
    except ValueError as error:
        return str(error)
    assert router.spec is not None
    return gpu_kernels.unserved(router.spec, router.mixer, torch.bfloat16)


def left_out(skipped: Iterable[dict[str, Any]]) -> list[str]:
    """A line for everything that is not counted, with the reason."""
    return [f"{entry['method']} at N={entry['streams']}: {entry['reason']}" for entry in skipped]


def share(gpu: Device, dim: int, moved: float, launches: float = 0) -> float:
    """The time of two sites as a fraction of an attention + MLP pair, at the memory bandwidth of the data sheet."""
    # 72 D^2 operations per token, forward and backward; narrow products reach less of the peak.
    pair = 72 * dim**2 * TOKENS / (gpu.flops * (0.35 if dim < 1024 else 0.5))
    return 2 * max(moved / gpu.bandwidth, launches * LAUNCH_SECONDS) / pair


def tables(found: list[dict[str, Any]]) -> str:
    """The counts, and the estimate that follows from them, as Markdown."""
    lines = [
        "| method | N | D | backend | units | of streams | floor | GB | launches |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        head = f"| {row['method']} | {row['streams']} | {row['dim']} | {row['backend']} "
        head += f"| {row['units']:.1f} | {row['of streams']:.1f} "
        lines.append(f"{head}| {row['floor']} | {row['bytes'] / 1e9:.2f} | {row['launches']} |")
    lines += [
        "",
        "Estimate, not a measurement: two sites as a share of an attention + MLP pair, at full bandwidth.",
        "",
    ]
    names = ("floor", "floor, chained", "triton", "triton, chained", "fused")
    lines += [f"| GPU | method | D | N | {' | '.join(names)} |", f"|---|---|---|---|{'---|' * len(names)}"]
    groups: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in found:
        groups.setdefault((row["method"], row["dim"], row["streams"]), {})[row["backend"]] = row
    for gpu in (DEVICES[name] for name in GPUS):
        for (method, dim, num_streams), ways in groups.items():
            unit, least = TOKENS * dim * 2, floors(num_streams)
            values = [share(gpu, dim, least["unchained"] * unit), share(gpu, dim, least["chained"] * unit)]
            values += [share(gpu, dim, ways[way]["bytes"], ways[way]["launches"]) for way in (*names[2:4], "fused")]
            shares = " | ".join(f"{value:.0%}" for value in values)
            lines.append(f"| {gpu.name} | {method} | {dim} | {num_streams} | {shares} |")
    return "\n".join(lines)
