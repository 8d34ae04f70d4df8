"""Autograd functions around the kernels of a backend.

The backward of `finish` does not compute the streams' gradient: it passes its own on, and the backward of `begin`
multiplies by res^T while it writes all parts at once. The gradient travels along `link`, a tensor in the shape of the
streams that owns no memory. Where two sites follow each other, `finish` of the first and `begin` of the second are
one function with one backward.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from temper.ops.plan import FoldedWeights, RawWeights, Routed, SiteSpec, State, tokens_of
from temper.ops.recompute import Origin, Segment
from temper.streams import no_autocast

if TYPE_CHECKING:
    from temper.mixers.base import Mixer
    from temper.ops.backend import Folding, Kernels


class KernelBackend:
    """A backend made of kernels with backwards written by hand."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self.name, self.scope, self.device = kernels.name, kernels.scope, kernels.device
        self.refusal, self.unavailable, self.limits = kernels.refusal, kernels.unavailable, kernels.limits

    @property
    def folding(self) -> Folding | None:
        return self.kernels.folding

    def open_site(
        self, streams: Tensor, weights: FoldedWeights | RawWeights, spec: SiteSpec, mixer: Mixer, group: int
    ) -> tuple[Tensor, State]:
        given, streams, dtype = streams, streams.contiguous(), streams.dtype
        is_folded, tensors = _unpack(weights)
        if needs_graph((streams, *tensors)):
            origin = Origin.of(given, group) if group else None
            x, routing, link, *_ = _Begin.apply(streams, spec, mixer, self.kernels, origin, is_folded, *tensors)
            return x, State(streams, dtype, routing, spec, self, link, origin)
        folded = _fold(is_folded, tensors, self.kernels, spec, dtype)
        x, (routing, _, _) = self.kernels.begin(tokens_of(streams), folded, spec, mixer)
        return x.view(*streams.shape[:-2], spec.dim), State(streams, dtype, routing, spec, self)

    def close_site(self, state: State, y: Tensor, in_place: bool) -> Tensor:
        streams, _, routing, spec, _, link, origin = state
        assert routing is not None
        assert spec is not None
        if not needs_graph((streams, y, routing)):
            flat_y = y.reshape(routing.shape[0], spec.dim)
            return self.kernels.finish(tokens_of(streams), flat_y, routing, spec, in_place).view(streams.shape)
        result: Tensor = _Finish.apply(link, streams, y, routing, spec, self.kernels, origin)
        if origin is not None:
            following = origin.following(y, routing, spec, self.kernels)
            if following is not None:
                following.mark(result)
        return result

    def close_and_open(
        self,
        state: State,
        y: Tensor,
        weights: FoldedWeights | RawWeights,
        spec: SiteSpec,
        mixer: Mixer,
        group: int,
        in_place: bool,
    ) -> tuple[Tensor, State]:
        streams, dtype, routing, _, _, link, origin = state
        assert routing is not None
        is_folded, tensors = _unpack(weights)
        kernels = self.kernels
        if not needs_graph((streams, y, routing, *tensors)):
            folded = _fold(is_folded, tensors, kernels, spec, dtype)
            flat_y = y.reshape(routing.shape[0], spec.dim)
            result, x, (next_routing, _, _) = kernels.finish_begin(
                tokens_of(streams), flat_y, routing, folded, spec, mixer, in_place
            )
            return x.view(y.shape), State(result.view(streams.shape), dtype, next_routing, spec, self)
        following = None
        if origin is not None and origin.segment.group == group:
            following = origin.following(y, routing, spec, kernels)
        result, x, next_routing, next_link, *_ = _FinishBegin.apply(
            link, streams, y, routing, spec, mixer, kernels, origin, following, is_folded, *tensors
        )
        if following is None and group:
            following = Origin.of(result, group)
        return x, State(result, dtype, next_routing, spec, self, next_link, following)

    def mix(self, logits: Tensor, mixer: Mixer) -> Tensor:
        lead = logits.shape[: logits.ndim - len(mixer.logit_shape)]
        flat = logits.reshape(math.prod(lead), *mixer.logit_shape)
        res = _Mix.apply(flat, mixer, self.kernels) if needs_graph((flat,)) else self.kernels.mix(flat, mixer)
        return res.view(*lead, mixer.num_streams, mixer.num_streams)


def needs_graph(tensors: Sequence[Tensor | None]) -> bool:
    """Whether autograd must record an operation on these tensors."""
    # These functions do not support forward-mode AD and must run to raise the error.
    if forward_ad._current_level >= 0:
        return True
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def _unpack(weights: FoldedWeights | RawWeights) -> tuple[bool, tuple[Tensor, ...]]:
    """A flag for folded weights, and their tensors."""
    if isinstance(weights, FoldedWeights):
        return True, (weights.in_map, weights.out, weights.bias)
    return False, weights.tensors


def _fold(
    is_folded: bool, tensors: Sequence[Tensor], kernels: Kernels, spec: SiteSpec, dtype: torch.dtype
) -> FoldedWeights:
    if is_folded:
        return FoldedWeights(*tensors)
    assert kernels.folding is not None
    return kernels.folding.fold(tensors, spec, dtype)


def _save(ctx: Any, **tensors: Sequence[Tensor]) -> None:
    """Saves groups of tensors for the backward; `_saved` returns them by name."""
    ctx.groups = list(zip(tensors, map(len, tensors.values()), strict=True))
    ctx.save_for_backward(*chain.from_iterable(tensors.values()))


def _saved(ctx: Any) -> dict[str, tuple[Tensor, ...]]:
    tensors, start, groups = ctx.saved_tensors, 0, {}
    for name, size in ctx.groups:
        groups[name] = tensors[start : start + size]
        start += size
    return groups


def _streams(segment: Segment | None, own: Sequence[Tensor]) -> Tensor:
    """(T, N, D), saved or recomputed."""
    return tokens_of(own[0] if segment is None else segment.streams(*own))


def _flat(gradient: Tensor | None, shape: Sequence[int]) -> Tensor | None:
    return None if gradient is None else gradient.reshape(shape)


def _gradients(ctx: Any, d_folded: FoldedWeights, weights: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
    """The gradients of the weights in the form they were given, folded or raw."""
    if ctx.is_folded:
        return d_folded.in_map, d_folded.out, d_folded.bias
    gradients: Sequence[Tensor] = ctx.kernels.folding.fold_backward(d_folded, weights, ctx.spec, dtype)
    return gradients


# Reshapes a kernel's result without an autograd view, so that callers may change it in place.
_shaped = torch.ops.aten._unsafe_view


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(
        streams: Tensor,
        spec: SiteSpec,
        mixer: Mixer,
        kernels: Any,
        origin: Origin | None,
        is_folded: bool,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        folded = _fold(is_folded, weights, kernels, spec, streams.dtype)
        x, routed = kernels.begin(tokens_of(streams), folded, spec, mixer)
        link = streams.new_empty(()).expand(streams.shape)
        # Only inputs and outputs can be saved, so weights folded here are returned as outputs.
        made = () if is_folded else folded[:3]
        x = _shaped(x, (*streams.shape[:-2], spec.dim))
        return x, routed.weights, link, routed.z, routed.norms, *made

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        streams, ctx.spec, ctx.mixer, ctx.kernels, origin, ctx.is_folded, *weights = inputs
        _, routing, _, z, norms, *made = output
        ctx.mark_non_differentiable(z, norms, *made)
        ctx.set_materialize_grads(False)
        ctx.segment, own = origin or (None, (streams,))
        ctx.lead = streams.shape[:-2]
        _save(ctx, weights=weights, routed=(routing, z, norms), made=made, own=own)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_x: Tensor | None, d_weights: Tensor | None, grad: Tensor | None, *_: None) -> Any:
        saved, spec = _saved(ctx), ctx.spec
        weights, own = saved["weights"], saved["own"]
        streams = _streams(ctx.segment, own)
        with no_autocast(streams):
            d_streams, d_folded = ctx.kernels.begin_backward(
                _flat(grad, streams.shape),
                _flat(d_x, (len(streams), spec.dim)),
                d_weights,
                streams,
                FoldedWeights(*(weights if ctx.is_folded else saved["made"])),
                Routed(*saved["routed"]),
                spec,
                ctx.mixer,
            )
            gradients = _gradients(ctx, d_folded, weights, streams.dtype)
        if ctx.segment is not None:
            ctx.segment.drop()
        return d_streams.view(*ctx.lead, *streams.shape[1:]), None, None, None, None, None, *gradients


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(
        link: Tensor | None,
        streams: Tensor,
        y: Tensor,
        routing: Tensor,
        spec: SiteSpec,
        kernels: Any,
        origin: Origin | None,
    ) -> Tensor:
        flat_y = y.reshape(routing.shape[0], spec.dim)
        result: Tensor = kernels.finish(tokens_of(streams), flat_y, routing, spec)
        return _shaped(result, streams.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, streams, y, routing, ctx.spec, ctx.kernels, origin = inputs
        ctx.segment, own = origin or (None, (streams,))
        ctx.save_for_backward(y, routing, *own)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        y, routing, *own = ctx.saved_tensors
        streams = _streams(ctx.segment, own)
        # The gradient of a sum over streams is expanded; copied here, it is not copied again by `begin`.
        grad = grad.contiguous()
        with no_autocast(streams):
            flat_y = y.reshape(len(streams), ctx.spec.dim)
            d_y, d_weights = ctx.kernels.finish_backward(_flat(grad, streams.shape), streams, flat_y, routing, ctx.spec)
        return grad if ctx.needs_input_grad[0] else None, None, d_y.view(y.shape), d_weights, None, None, None


class _FinishBegin(torch.autograd.Function):
    """`finish` of one site and `begin` of the next; `spec`, `mixer` and `weights` are those of the next."""

    @staticmethod
    def forward(
        link: Tensor | None,
        streams: Tensor,
        y: Tensor,
        routing: Tensor,
        spec: SiteSpec,
        mixer: Mixer,
        kernels: Any,
        origin: Origin | None,
        following: Origin | None,
        is_folded: bool,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        folded = _fold(is_folded, weights, kernels, spec, streams.dtype)
        flat_y = y.reshape(routing.shape[0], spec.dim)
        result, x, routed = kernels.finish_begin(tokens_of(streams), flat_y, routing, folded, spec, mixer)
        next_link = streams.new_empty(()).expand(streams.shape)
        made = () if is_folded else folded[:3]
        following_streams, x = _shaped(result, streams.shape), _shaped(x, y.shape)
        return following_streams, x, routed.weights, next_link, routed.z, routed.norms, *made

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, streams, y, routing, ctx.spec, ctx.mixer, ctx.kernels, origin, following, ctx.is_folded, *weights = inputs
        result, _, next_routing, _, z, norms, *made = output
        ctx.mark_non_differentiable(z, norms, *made)
        ctx.set_materialize_grads(False)
        ctx.segment, own = origin or (None, (streams,))
        ctx.next_segment, next_own = following or (None, (result,))
        routed = (next_routing, z, norms)
        _save(ctx, weights=weights, routed=routed, made=made, before=(y, routing), own=own, next_own=next_own)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        d_next: Tensor | None,
        d_x: Tensor | None,
        d_next_weights: Tensor | None,
        grad: Tensor | None,
        *_: None,
    ) -> Any:
        saved, spec, mixer, kernels = _saved(ctx), ctx.spec, ctx.mixer, ctx.kernels
        weights, (y, routing) = saved["weights"], saved["before"]
        streams, next_streams = _streams(ctx.segment, saved["own"]), _streams(ctx.next_segment, saved["next_own"])
        shape, flat_shape = streams.shape, (len(streams), spec.dim)
        later = (
            _flat(grad, shape),
            _flat(d_x, flat_shape),
            d_next_weights,
            next_streams,
            FoldedWeights(*(weights if ctx.is_folded else saved["made"])),
            Routed(*saved["routed"]),
        )
        earlier = (streams, y.reshape(flat_shape), routing)
        with no_autocast(streams):
            if d_next is None:
                total, d_folded, d_y, d_weights = kernels.finish_begin_backward(*later, *earlier, spec, mixer)
            else:
                # The streams between the two sites have another consumer.
                total, d_folded = kernels.begin_backward(*later, spec, mixer)
                total = total + _flat(d_next, shape)
                d_y, d_weights = kernels.finish_backward(total, *earlier, spec)
            gradients = _gradients(ctx, d_folded, weights, streams.dtype)
        if ctx.next_segment is not None:
            ctx.next_segment.drop()
        handed_on = total.view(*y.shape[:-1], *shape[-2:]) if ctx.needs_input_grad[0] else None
        return handed_on, None, d_y.view(y.shape), d_weights, *[None] * 6, *gradients


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(logits: Tensor, mixer: Mixer, kernels: Any) -> Tensor:
        result: Tensor = kernels.mix(logits, mixer)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        logits, ctx.mixer, ctx.kernels = inputs
        ctx.save_for_backward(logits, output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, res = ctx.saved_tensors
        return ctx.kernels.mix_backward(logits, res, grad, ctx.mixer), None, None


class _Bound(NamedTuple):
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def apply_defaults(self) -> None:
        pass


class _PositionalSignature(inspect.Signature):
    """A signature whose `bind` assumes every argument is positional.

    torch asks for the signature in every call; working it out and binding to it takes longer than a small kernel.
    """

    def bind(self, *args: Any, **kwargs: Any) -> Any:
        return _Bound(args, kwargs)


for _function in (_Begin, _Finish, _FinishBegin, _Mix):
    _known = inspect.signature(_function.forward)
    _function.forward.__signature__ = _PositionalSignature(list(_known.parameters.values()))  # type: ignore[union-attr]
