"""One site's two operations as autograd sees them, whatever implementation does the work.

`finish` does not give the streams their gradient: it hands on what it got, and `begin` multiplies by res^T while
it writes all parts at once. The gradient travels along `link`, a tensor in the shape of the streams that has no
memory of its own.
"""

from __future__ import annotations

import inspect
import math
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from temper.ops import naive
from temper.ops.kept import Source
from temper.ops.plan import Fold, Plan
from temper.precision import no_autocast, widen

if TYPE_CHECKING:
    from temper.mixers.base import Mixer


class Link(NamedTuple):
    """What goes from `begin` to `finish`.

    Args:
        streams: with their leading dimensions; in the precision of the routing where autograd does everything.
        weights: (..., K), the routing of every token.
        link: carries the gradient back; None where autograd does everything.
        source: how to get the streams again, if they are not kept.
    """

    streams: Tensor
    weights: Tensor
    link: Tensor | None
    source: Source | None
    plan: Plan
    implementation: ModuleType
    dtype: torch.dtype


def fold(tensors: tuple[Tensor, ...], plan: Plan, implementation: ModuleType, dtype: torch.dtype) -> Fold:
    """All of a site's weights folded together, by an implementation that has a `fold` for streams of this dtype."""
    return Fold(*_Fold.apply(plan, implementation, dtype, *tensors))


def begin(
    streams: Tensor, fold: Fold, plan: Plan, mixer: Mixer, implementation: ModuleType, group: int = 0
) -> tuple[Tensor, Link]:
    """x and what `finish` needs: (..., N, D) -> (..., D), link.

    Args:
        group: keep only the streams of every so manieth site and make the others again; 0 keeps all.
    """
    with no_autocast(streams):
        if implementation is naive:
            wide = widen(streams)
            x, weights = naive.begin(wide, fold, plan, mixer)
            return x.to(streams.dtype), Link(wide, weights, None, None, plan, implementation, streams.dtype)
        given, streams = streams, streams.contiguous()
        tokens = streams.view(_count(streams), plan.num_streams, plan.dim)
        source = Source.of(given, tokens, group)
        x, weights, link, _, _ = _Begin.apply(tokens, *fold, plan, mixer, implementation, source)
    x = x.view(*streams.shape[:-2], plan.dim)
    return x, Link(streams, weights, link, source, plan, implementation, streams.dtype)


def finish(state: Link, y: Tensor, in_place: bool = False) -> Tensor:
    """The next streams (..., N, D)."""
    streams, weights, link, source, plan, implementation, dtype = state
    with no_autocast(streams):
        if implementation is naive:
            return naive.finish(streams, y, weights, plan).to(dtype)
        count = _count(streams)
        tokens, y = streams.view(count, plan.num_streams, plan.dim), y.reshape(count, plan.dim)
        if in_place and hasattr(implementation, "finish_"):
            implementation.finish_(tokens, y, weights, plan)
            return streams
        result = _Finish.apply(link, tokens, y, weights, plan, implementation, source).view(streams.shape)
    if source is not None:
        source.lead_to(result, y, weights, plan, implementation)
    return result


def mix(logits: Tensor, mixer: Mixer, implementation: ModuleType) -> Tensor:
    """res (..., N, N) of logits (..., *logit_shape)."""
    lead = logits.shape[: logits.ndim - len(mixer.logit_shape)]
    if implementation is naive:
        return mixer.mix(logits)
    # Not -1: without tokens that could be any number.
    res = _Mix.apply(logits.reshape(math.prod(lead), *mixer.logit_shape), mixer, implementation)
    return res.view(*lead, mixer.num_streams, mixer.num_streams)


def _count(streams: Tensor) -> int:
    """The number of tokens."""
    return math.prod(streams.shape[:-2])


class _Fold(torch.autograd.Function):
    @staticmethod
    def forward(plan: Plan, implementation: Any, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(implementation.fold(tensors, plan, dtype))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.plan, ctx.implementation, ctx.dtype, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_fold: Tensor) -> Any:
        slopes = ctx.implementation.fold_backward(Fold(*d_fold), ctx.saved_tensors, ctx.plan, ctx.dtype)
        return None, None, None, *slopes


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(
        streams: Tensor,
        in_map: Tensor,
        out: Tensor,
        bias: Tensor,
        plan: Plan,
        mixer: Mixer,
        implementation: Any,
        source: Source | None,
    ) -> tuple[Tensor, ...]:
        x, weights, z, norms = implementation.begin(streams, Fold(in_map, out, bias), plan, mixer)
        return x, weights, streams.new_empty(()).expand(streams.shape), z, norms

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        streams, in_map, out, bias, ctx.plan, ctx.mixer, ctx.implementation, source = inputs
        _, weights, _, z, norms = output
        ctx.mark_non_differentiable(z, norms)
        ctx.set_materialize_grads(False)
        ctx.kept, own = source or (None, (streams,))
        ctx.save_for_backward(in_map, out, bias, weights, z, norms, *own)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_x: Tensor | None, d_weights: Tensor | None, grad: Tensor | None, *_: None) -> Any:
        in_map, out, bias, weights, z, norms, *own = ctx.saved_tensors
        streams = own[0] if ctx.kept is None else ctx.kept.streams(*own)
        with no_autocast(streams):
            d_streams, d_fold = ctx.implementation.begin_backward(
                grad, d_x, d_weights, streams, Fold(in_map, out, bias), weights, z, norms, ctx.plan, ctx.mixer
            )
        if ctx.kept is not None:
            ctx.kept.drop()
        return d_streams, *d_fold, None, None, None, None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(
        link: Tensor,
        streams: Tensor,
        y: Tensor,
        weights: Tensor,
        plan: Plan,
        implementation: Any,
        source: Source | None,
    ) -> Tensor:
        result: Tensor = implementation.finish(streams, y, weights, plan)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, streams, y, weights, ctx.plan, ctx.implementation, source = inputs
        ctx.kept, own = source or (None, (streams,))
        ctx.save_for_backward(y, weights, *own)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        y, weights, *own = ctx.saved_tensors
        streams = own[0] if ctx.kept is None else ctx.kept.streams(*own)
        with no_autocast(streams):
            d_y, d_weights = ctx.implementation.finish_backward(grad, streams, y, weights, ctx.plan)
        return grad, None, d_y, d_weights, None, None, None


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(logits: Tensor, mixer: Mixer, implementation: Any) -> Tensor:
        result: Tensor = implementation.mix(logits, mixer)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        logits, ctx.mixer, ctx.implementation = inputs
        ctx.save_for_backward(logits, output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, res = ctx.saved_tensors
        return ctx.implementation.mix_backward(logits, res, grad, ctx.mixer), None, None


for _function in (_Fold, _Begin, _Finish, _Mix):
    # torch asks for the signature in every call; working it out takes longer than a small kernel.
    _function.forward.__signature__ = inspect.signature(_function.forward)  # type: ignore[union-attr]
