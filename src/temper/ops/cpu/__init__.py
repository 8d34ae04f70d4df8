"""The operations on streams by native kernels, compiled on this machine when they are first needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from temper.ops.cpu import build
from temper.ops.cpu.operators import ELEMENT_TYPES, operator
from temper.ops.plan import NOT_STANDARD, FoldedWeights, Routed, SiteSpec

if TYPE_CHECKING:
    from temper.mixers.base import Mixer

name = "cpu"
device: str | None = "cpu"
scope = "float32 and bfloat16 streams on a CPU, by native kernels"
MAX_STREAMS = 64


def refusal(spec: SiteSpec, mixer: Mixer, streams: Tensor, asked: bool) -> str | None:
    """Why the kernels cannot run a site on these streams; None if they can."""
    dtype = streams.dtype
    # The operators accept tracers' tensor types; a DTensor's memory is elsewhere.
    if type(streams) is not Tensor and hasattr(streams, "device_mesh"):
        return "the streams are distributed (a DTensor)"
    if dtype not in ELEMENT_TYPES:
        return f"the kernels have no {dtype}"
    # float64 is used for verification, where plain torch is the better reference; the kernels support it on request.
    if dtype == torch.float64 and not asked:
        return "float64 is left to fused unless it is asked for"
    if not spec.is_standard:
        return NOT_STANDARD
    if spec.mixer is None:
        return f"the kernels do not know the {mixer.name} mixer with these options"
    if spec.num_streams > MAX_STREAMS:
        return f"the kernels take up to {MAX_STREAMS} streams"
    return None if build.can_load(ELEMENT_TYPES[dtype]) else "the kernels could not be built"


def unavailable() -> str | None:
    """The reason why the kernels cannot be built, as far as can be told without building."""
    return build.why_not()


def limits() -> list[str]:
    """The sites that the kernels leave to the next backend."""
    from temper.mixers import Mixer

    foreign = [key for key, mixer in sorted(Mixer.members.items()) if mixer.native is Mixer.native]
    return [NOT_STANDARD, *foreign, "sinkhorn with tol and eps at once"]


class _Folding:
    """Folding by `fold.h`, for the generators that the kernels support."""

    def fold(self, raw: Sequence[Tensor], spec: SiteSpec, dtype: torch.dtype) -> FoldedWeights:
        sizes = [spec.num_rows, sum(spec.map_sizes), sum(spec.head_logits)]
        return FoldedWeights(*operator("fold", raw)(raw, spec.generators, sizes, dtype == torch.bfloat16))

    def fold_backward(
        self, d_folded: FoldedWeights, raw: Sequence[Tensor], spec: SiteSpec, dtype: torch.dtype
    ) -> list[Tensor]:
        d_in, d_out, d_bias, _ = d_folded
        run = operator("fold_backward", (d_in, d_out, d_bias, *raw))
        result: list[Tensor] = run(d_in, d_out, d_bias, raw, spec.generators, dtype == torch.bfloat16)
        return result


folding = _Folding()


def begin(streams_TND: Tensor, folded: FoldedWeights, spec: SiteSpec, mixer: Mixer) -> tuple[Tensor, Routed]:
    """x, and the routing with what is saved for the backward."""
    tensors = (streams_TND, *folded[:3])
    x, weights, z, norms = operator("begin", tensors)(*tensors, *spec.packed)
    return x, Routed(weights, z, norms)


def begin_backward(
    grad_TND: Tensor | None,
    d_x_TD: Tensor | None,
    d_weights_TK: Tensor | None,
    streams_TND: Tensor,
    folded: FoldedWeights,
    routed: Routed,
    spec: SiteSpec,
    mixer: Mixer,
) -> tuple[Tensor, FoldedWeights]:
    """The gradients of the streams and of the folded weights."""
    tensors = (grad_TND, d_x_TD, d_weights_TK, streams_TND, *folded[:3], *routed)
    d_streams, *d_folded = operator("begin_backward", tensors)(*tensors, *spec.packed)
    return d_streams, FoldedWeights(*d_folded)


def finish(streams_TND: Tensor, y_TD: Tensor, weights_TK: Tensor, spec: SiteSpec, in_place: bool = False) -> Tensor:
    """The next streams, written over the current ones if allowed."""
    tensors = (streams_TND, _branch(y_TD, streams_TND), weights_TK)
    if in_place:
        # Through the dispatcher, which bumps the version counter.
        torch.ops.temper.finish_(*tensors, *spec.packed)
        return streams_TND
    result: Tensor = operator("finish", tensors)(*tensors, *spec.packed)
    return result


def finish_backward(
    grad_TND: Tensor, streams_TND: Tensor, y_TD: Tensor, weights_TK: Tensor, spec: SiteSpec
) -> tuple[Tensor, Tensor]:
    """The gradients of y and of the routing weights."""
    tensors = (grad_TND, streams_TND, _branch(y_TD, streams_TND), weights_TK)
    d_y, d_weights = operator("finish_backward", tensors)(*tensors, *spec.packed)
    return d_y.to(y_TD.dtype), d_weights


def finish_begin(
    streams_TND: Tensor,
    y_TD: Tensor,
    weights_TK: Tensor,
    folded: FoldedWeights,
    spec: SiteSpec,
    mixer: Mixer,
    in_place: bool = False,
) -> tuple[Tensor, Tensor, Routed]:
    """`finish` of one site and `begin` of the next."""
    tensors = (streams_TND, _branch(y_TD, streams_TND), weights_TK, *folded[:3])
    if in_place:
        # Through the dispatcher, which bumps the version counter.
        x, *routed = torch.ops.temper.finish_begin_(*tensors, *spec.packed)
        return streams_TND, x, Routed(*routed)
    next_TND, x, *routed = operator("finish_begin", tensors)(*tensors, *spec.packed)
    return next_TND, x, Routed(*routed)


def finish_begin_backward(
    grad_TND: Tensor | None,
    d_x_TD: Tensor | None,
    d_next_weights_TK: Tensor | None,
    next_TND: Tensor,
    folded: FoldedWeights,
    routed: Routed,
    streams_TND: Tensor,
    y_TD: Tensor,
    weights_TK: Tensor,
    spec: SiteSpec,
    mixer: Mixer,
) -> tuple[Tensor, FoldedWeights, Tensor, Tensor]:
    """The gradients of the next streams, of the folded weights, of y and of the routing weights."""
    later = (grad_TND, d_x_TD, d_next_weights_TK, next_TND, *folded[:3], *routed)
    tensors = (*later, streams_TND, _branch(y_TD, streams_TND), weights_TK)
    d_next, d_in, d_out, d_bias, d_y, d_weights = operator("finish_begin_backward", tensors)(*tensors, *spec.packed)
    return d_next, FoldedWeights(d_in, d_out, d_bias), d_y.to(y_TD.dtype), d_weights


def mix(logits: Tensor, mixer: Mixer) -> Tensor:
    """res of logits (T, *logit_shape)."""
    result: Tensor = torch.ops.temper.mix(logits, *mixer.site_spec().packed)
    return result


def mix_backward(logits: Tensor, res: Tensor, grad: Tensor, mixer: Mixer) -> Tensor:
    """The gradient of the logits."""
    result: Tensor = torch.ops.temper.mix_backward(logits, res, grad, *mixer.site_spec().packed)
    return result


def _branch(y: Tensor, streams: Tensor) -> Tensor:
    """y in a dtype that the kernels accept with these streams."""
    if y.dtype == streams.dtype:
        return y
    pair = (torch.float32, torch.bfloat16)
    return y if y.dtype in pair and streams.dtype in pair else y.to(streams.dtype)
