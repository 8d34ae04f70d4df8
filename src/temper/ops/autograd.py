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


class Stored(tuple[Tensor, ...]):
    """The weights of a site before they are folded, for an implementation that has a `fold`."""


def begin(
    streams: Tensor, weights: Fold | Stored, plan: Plan, mixer: Mixer, implementation: ModuleType, group: int = 0
) -> tuple[Tensor, Link]:
    """x and what `finish` needs: (..., N, D) -> (..., D), link.

    Args:
        weights: of the site, folded or as it has them.
        group: keep only the streams of every so manieth site and make the others again; 0 keeps all.
    """
    with no_autocast(streams):
        if implementation is naive:
            assert isinstance(weights, Fold)
            wide = widen(streams)
            x, routing = naive.begin(wide, weights, plan, mixer)
            return x.to(streams.dtype), Link(wide, routing, None, None, plan, implementation, streams.dtype)
        given, streams = streams, streams.contiguous()
        tokens = streams.view(_count(streams), plan.num_streams, plan.dim)
        source = Source.of(given, tokens, group)
        folded = isinstance(weights, Fold)
        x, routing, link, *_ = _Begin.apply(tokens, plan, mixer, implementation, source, folded, *weights)
    x = x.view(*streams.shape[:-2], plan.dim)
    return x, Link(streams, routing, link, source, plan, implementation, streams.dtype)


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


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(
        streams: Tensor,
        plan: Plan,
        mixer: Mixer,
        implementation: Any,
        source: Source | None,
        folded: bool,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        fold = Fold(*weights) if folded else implementation.fold(weights, plan, streams.dtype)
        x, routing, z, norms = implementation.begin(streams, fold, plan, mixer)
        # Only outputs may be kept; what was given is kept as it is.
        return x, routing, streams.new_empty(()).expand(streams.shape), z, norms, *(() if folded else fold)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        streams, ctx.plan, ctx.mixer, ctx.implementation, source, ctx.folded, *weights = inputs
        _, routing, _, *small = output
        ctx.mark_non_differentiable(*small)
        ctx.set_materialize_grads(False)
        ctx.kept, own = source or (None, (streams,))
        ctx.counts = len(weights), len(small) + 1
        ctx.save_for_backward(*weights, routing, *small, *own)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_x: Tensor | None, d_weights: Tensor | None, grad: Tensor | None, *_: None) -> Any:
        saved, (given, small) = ctx.saved_tensors, ctx.counts
        weights, (routing, z, norms, *folded), own = saved[:given], saved[given : given + small], saved[given + small :]
        fold = Fold(*(weights if ctx.folded else folded))
        streams = own[0] if ctx.kept is None else ctx.kept.streams(*own)
        with no_autocast(streams):
            d_streams, slopes = ctx.implementation.begin_backward(
                grad, d_x, d_weights, streams, fold, routing, z, norms, ctx.plan, ctx.mixer
            )
            if not ctx.folded:
                slopes = ctx.implementation.fold_backward(slopes, weights, ctx.plan, streams.dtype)
        if ctx.kept is not None:
            ctx.kept.drop()
        return d_streams, None, None, None, None, None, *slopes


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


class _Bound(NamedTuple):
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def apply_defaults(self) -> None:
        pass


class _Positional(inspect.Signature):
    """Of a function that is given all it takes, in its place.

    torch asks for the signature in every call; working it out, and who gets what, takes longer than a small kernel.
    """

    def bind(self, *args: Any, **kwargs: Any) -> Any:
        return _Bound(args, kwargs)


for _function in (_Begin, _Finish, _Mix):
    _known = inspect.signature(_function.forward)
    _function.forward.__signature__ = _Positional(list(_known.parameters.values()))  # type: ignore[union-attr]
