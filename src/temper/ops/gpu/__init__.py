"""The operations on streams by Triton kernels, on GPUs. Every GPU build of torch includes triton.

`kernels/` has the kernels, `launch` cuts the work, `tiles` says how, `operators` registers all of it with torch, and
`check` compares the kernels with the definition on the present GPU before they are used. docs/gpu.md has the design.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from temper.ops.gpu import check, fold_launch, launch, operators, tiles
from temper.ops.gpu.operators import operator
from temper.ops.plan import NOT_STANDARD, FoldedWeights, Routed, SiteSpec

if TYPE_CHECKING:
    from temper.mixers.base import Mixer

name = "triton"
device: str | None = operators.DEVICE
scope = (
    "float32 and bfloat16 streams on a GPU, by Triton kernels (checked in the interpreter, not yet run on a GPU by us)"
)
# Targets confirmed by a report of `temper gpu-check` (docs/gpu.md), where the kernels are chosen by default.
CONFIRMED: frozenset[str] = frozenset()
# Compute capability; older GPUs have no bfloat16 on their tensor cores.
OLDEST = (8, 0)


def refusal(spec: SiteSpec, mixer: Mixer, streams: Tensor, asked: bool) -> str | None:
    """Why the kernels cannot run a site on these streams; None if they can."""
    # The operators accept tracers' tensor types; a DTensor's memory is elsewhere.
    if type(streams) is not Tensor and hasattr(streams, "device_mesh"):
        return "the streams are distributed (a DTensor)"
    reason = unavailable() or too_old(streams.device) or unserved(spec, mixer, streams.dtype)
    if reason is not None:
        return reason
    target = tiles.target_of(streams.device)
    if not asked and target not in CONFIRMED:
        return f"nobody has sent a report from {target} yet: TEMPER_BACKEND=triton asks for the kernels (docs/gpu.md)"
    return (
        None
        if check.passes(spec, mixer, streams.dtype, streams.device)
        else "the kernels failed their check on this GPU"
    )


def unserved(spec: SiteSpec, mixer: Mixer, dtype: torch.dtype) -> str | None:
    """Why the kernels do not serve a site on any GPU; None if they do."""
    if dtype not in launch.STORED:
        return f"the kernels have no {dtype}"
    if not spec.is_standard:
        return NOT_STANDARD
    if spec.mixer is None:
        return f"the kernels do not know the {mixer.name} mixer with these options"
    if not 2 <= spec.num_streams <= launch.MAX_STREAMS:
        return f"the kernels take 2 to {launch.MAX_STREAMS} streams"
    if spec.num_logits > launch.MAX_LOGITS:
        return f"the kernels take up to {launch.MAX_LOGITS:,} logits"
    if spec.generators is not None and not fold_launch.serves(spec.generators):
        return "the kernels take logits with one mode or two"
    return None


@cache
def _obstacle() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; a torch built for GPUs brings it"
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    if all(_age(torch.device("cuda", index)) for index in range(torch.cuda.device_count())):
        return "every GPU is older than compute capability 8.0"
    return None


@lru_cache(maxsize=64)
def _age(device: torch.device) -> str | None:
    is_old = device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) < OLDEST
    return "the GPU is older than compute capability 8.0" if is_old else None


def too_old(device: torch.device) -> str | None:
    """Why the kernels cannot run on this GPU, where they can on others; None if they can."""
    return _age(device)


def unavailable() -> str | None:
    """Why the kernels can run nothing on this machine; None if they can."""
    return _obstacle()


# The effect of torch.compiler.assume_constant_result, without importing the compiler. A cached function itself would be
# traced in spite of it.
unavailable._dynamo_marked_constant = True  # type: ignore[attr-defined]
too_old._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _warn() -> None:
    reason = unavailable()
    if reason is not None:
        warnings.warn(
            f"the Triton kernels were asked for and cannot run here: {reason}. The next backend that can runs instead; "
            "temper.list_backends() shows which there are",
            RuntimeWarning,
            stacklevel=4,
        )


def warn_if_unavailable() -> None:
    """Warns who asked for the kernels, once in a process, if they can run nothing on this machine."""
    _warn()


warn_if_unavailable._dynamo_marked_constant = True  # type: ignore[attr-defined]


def limits() -> list[str]:
    """The sites that the kernels leave to the next backend."""
    from temper.mixers import Mixer

    foreign = [key for key, mixer in sorted(Mixer.members.items()) if mixer.native is Mixer.native]
    others = [f"more than {launch.MAX_STREAMS} streams", f"more than {launch.MAX_LOGITS:,} logits"]
    unasked = [] if CONFIRMED else ["everything unless it is asked for"]
    return [*unasked, NOT_STANDARD, *foreign, "sinkhorn with tol and eps at once", *others, *check.failures()]


class _Folding:
    """One launch for the weights of a site, three for their gradients."""

    def fold(self, raw: Sequence[Tensor], spec: SiteSpec, dtype: torch.dtype) -> FoldedWeights:
        sizes = [spec.num_rows, sum(spec.map_sizes), sum(spec.head_logits)]
        return FoldedWeights(*operator("fold", raw)(raw, spec.generators, sizes, dtype == torch.bfloat16))

    def fold_backward(
        self, d_folded: FoldedWeights, raw: Sequence[Tensor], spec: SiteSpec, dtype: torch.dtype
    ) -> list[Tensor]:
        given = d_folded[:3]
        run = operator("fold_backward", (*given, *raw))
        result: list[Tensor] = run(*given, raw, spec.generators, dtype == torch.bfloat16)
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
    tensors = (streams_TND, y_TD, weights_TK)
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
    tensors = (grad_TND, streams_TND, y_TD, weights_TK)
    d_y, d_weights = operator("finish_backward", tensors)(*tensors, *spec.packed)
    return d_y, d_weights


def finish_begin(
    streams_TND: Tensor,
    y_TD: Tensor,
    weights_TK: Tensor,
    folded: FoldedWeights,
    spec: SiteSpec,
    mixer: Mixer,
    in_place: bool = False,
) -> tuple[Tensor, Tensor, Routed]:
    """`finish` of one site and `begin` of the next, in one pass over the streams."""
    tensors = (streams_TND, y_TD, weights_TK, *folded[:3])
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
    tensors = (*later, streams_TND, y_TD, weights_TK)
    d_next, d_in, d_out, d_bias, d_y, d_weights = operator("finish_begin_backward", tensors)(*tensors, *spec.packed)
    return d_next, FoldedWeights(d_in, d_out, d_bias), d_y, d_weights


def mix(logits: Tensor, mixer: Mixer) -> Tensor:
    """res of logits (T, *logit_shape)."""
    result: Tensor = operator("mix", (logits,))(logits, *mixer.site_spec().packed)
    return result


def mix_backward(logits: Tensor, res: Tensor, grad: Tensor, mixer: Mixer) -> Tensor:
    """The gradient of the logits."""
    result: Tensor = operator("mix_backward", (logits, res, grad))(logits, res, grad, *mixer.site_spec().packed)
    return result
