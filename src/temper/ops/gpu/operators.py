"""The launches as CUDA implementations of the `temper::` operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from temper.ops import schema
from temper.ops.gpu import fold_launch, launch
from temper.ops.plan import FoldedWeights, Routed, SiteSpec

# The device type that the kernels accept; ROCm uses the same name.
DEVICE = "cuda"


def operator(name: str, tensors: Sequence[Tensor | None]) -> Callable[..., Any]:
    """An operator for these tensors, called directly unless a tracer, mode or profiler must see it."""
    if schema.must_dispatch(DEVICE, tensors):
        dispatched: Callable[..., Any] = getattr(torch.ops.temper, name)
        return dispatched
    return IMPLS[name]


def _begin(
    streams: Tensor, in_map: Tensor, out: Tensor, bias: Tensor, ints: list[int], floats: list[float]
) -> tuple[Tensor, ...]:
    x, routed = launch.begin(streams, FoldedWeights(in_map, out, bias), SiteSpec.from_packed(ints, floats))
    return x, *routed


def _begin_backward(
    grad: Tensor | None,
    d_x: Tensor | None,
    d_weights: Tensor | None,
    streams: Tensor,
    in_map: Tensor,
    out: Tensor,
    bias: Tensor,
    weights: Tensor,
    z: Tensor,
    norms: Tensor,
    ints: list[int],
    floats: list[float],
) -> tuple[Tensor, ...]:
    folded, routed, spec = (
        FoldedWeights(in_map, out, bias),
        Routed(weights, z, norms),
        SiteSpec.from_packed(ints, floats),
    )
    d_streams, d_folded = launch.begin_backward(grad, d_x, d_weights, streams, folded, routed, spec)
    return d_streams, *d_folded[:3]


def _finish(streams: Tensor, y: Tensor, weights: Tensor, ints: list[int], floats: list[float]) -> Tensor:
    target = streams.new_empty(streams.shape)
    launch.finish(target, streams, y, weights, SiteSpec.from_packed(ints, floats))
    return target


def _finish_in_place(streams: Tensor, y: Tensor, weights: Tensor, ints: list[int], floats: list[float]) -> None:
    if streams.is_contiguous():
        launch.finish(streams, streams, y, weights, SiteSpec.from_packed(ints, floats))
    else:
        streams.copy_(_finish(streams, y, weights, ints, floats))


def _finish_backward(
    grad: Tensor, streams: Tensor, y: Tensor, weights: Tensor, ints: list[int], floats: list[float]
) -> tuple[Tensor, Tensor]:
    return launch.finish_backward(grad, streams, y, weights, SiteSpec.from_packed(ints, floats))


def _finish_begin(
    streams: Tensor,
    y: Tensor,
    weights: Tensor,
    in_map: Tensor,
    out: Tensor,
    bias: Tensor,
    ints: list[int],
    floats: list[float],
) -> tuple[Tensor, ...]:
    target, folded = streams.new_empty(streams.shape), FoldedWeights(in_map, out, bias)
    x, routed = launch.finish_begin(target, streams, y, weights, folded, SiteSpec.from_packed(ints, floats))
    return target, x, *routed


def _finish_begin_in_place(streams: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    y, weights, *maps, ints, floats = rest
    if not streams.is_contiguous():
        following, *begun = _finish_begin(streams, *rest)
        streams.copy_(following)
        return tuple(begun)
    spec = SiteSpec.from_packed(ints, floats)
    x, routed = launch.finish_begin(streams, streams, y, weights, FoldedWeights(*maps), spec)
    return x, *routed


def _finish_begin_backward(
    grad: Tensor | None,
    d_x: Tensor | None,
    d_next_weights: Tensor | None,
    following: Tensor,
    in_map: Tensor,
    out: Tensor,
    bias: Tensor,
    next_weights: Tensor,
    z: Tensor,
    norms: Tensor,
    streams: Tensor,
    y: Tensor,
    weights: Tensor,
    ints: list[int],
    floats: list[float],
) -> tuple[Tensor, ...]:
    folded, routed, spec = (
        FoldedWeights(in_map, out, bias),
        Routed(next_weights, z, norms),
        SiteSpec.from_packed(ints, floats),
    )
    later = (grad, d_x, d_next_weights, following, folded, routed)
    d_next, d_folded, d_y, d_weights = launch.finish_begin_backward(*later, streams, y, weights, spec)
    return d_next, *d_folded[:3], d_y, d_weights


def _mix(logits: Tensor, ints: list[int], floats: list[float]) -> Tensor:
    return launch.mix(logits, SiteSpec.from_packed(ints, floats))


def _mix_backward(logits: Tensor, res: Tensor, grad: Tensor, ints: list[int], floats: list[float]) -> Tensor:
    return launch.mix_backward(logits, res, grad, SiteSpec.from_packed(ints, floats))


def _fold(tensors: list[Tensor], generators: list[int], sizes: list[int], half: bool) -> tuple[Tensor, ...]:
    results: tuple[Tensor, ...] = schema.SHAPES["fold"](tensors, generators, sizes, half)
    fold_launch.fold(tensors, generators, results)
    return results


def _fold_backward(
    d_in: Tensor, d_out: Tensor, d_bias: Tensor, tensors: list[Tensor], generators: list[int], half: bool
) -> list[Tensor]:
    results: list[Tensor] = schema.SHAPES["fold_backward"](d_in, d_out, d_bias, tensors, generators, half)
    fold_launch.fold_backward(d_in, d_out, d_bias, tensors, generators, results)
    return results


IMPLS: dict[str, Callable[..., Any]] = {
    "fold": _fold,
    "fold_backward": _fold_backward,
    "begin": _begin,
    "begin_backward": _begin_backward,
    "finish": _finish,
    "finish_": _finish_in_place,
    "finish_backward": _finish_backward,
    "finish_begin": _finish_begin,
    "finish_begin_": _finish_begin_in_place,
    "finish_begin_backward": _finish_begin_backward,
    "mix": _mix,
    "mix_backward": _mix_backward,
}
schema.register("CUDA", IMPLS)
