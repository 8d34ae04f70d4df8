"""Kernels made differentiable: one site's two operations as autograd sees them.

`finish` does not give the streams their gradient: it hands on what it got, and the backward of `begin` multiplies by
res^T while it writes all parts at once. The gradient travels along `link`, a tensor in the shape of the streams that
has no memory of its own.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from temper.ops.plan import FoldedWeights, RawWeights, Routed, SiteSpec, State
from temper.ops.recompute import Origin
from temper.precision import no_autocast

if TYPE_CHECKING:
    from temper.mixers.base import Mixer
    from temper.ops.backend import Folding, Kernels


class KernelBackend:
    """A backend made of kernels with backwards written by hand."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self.name, self.scope = kernels.name, kernels.scope
        self.refusal, self.unavailable, self.limits = kernels.refusal, kernels.unavailable, kernels.limits

    @property
    def folding(self) -> Folding | None:
        return self.kernels.folding

    def open_site(
        self, streams: Tensor, weights: FoldedWeights | RawWeights, spec: SiteSpec, mixer: Mixer, group: int
    ) -> tuple[Tensor, State]:
        given, streams = streams, streams.contiguous()
        lead, dtype = streams.shape[:-2], streams.dtype
        # Not -1: without tokens that could be any number.
        tokens = streams.view(math.prod(lead), spec.num_streams, spec.dim)
        link, origin = None, None
        is_folded = isinstance(weights, FoldedWeights)
        passed = weights[:3] if isinstance(weights, FoldedWeights) else weights.tensors
        if needs_graph((tokens, *passed)):
            origin = Origin.of(given, tokens, group)
            x, routing, link, *_ = _Begin.apply(tokens, spec, mixer, self.kernels, origin, is_folded, *passed)
        else:
            x, (routing, _, _) = self.kernels.begin(tokens, folded_of(weights, self.kernels, spec, dtype), spec, mixer)
        return x.view(*lead, spec.dim), State(streams, dtype, routing, spec, self, link, origin)

    def close_site(self, state: State, y: Tensor, in_place: bool) -> Tensor:
        streams, _, weights, spec, _, link, origin = state
        assert weights is not None
        assert spec is not None
        tokens = streams.view(weights.shape[0], spec.num_streams, spec.dim)
        y = y.reshape(weights.shape[0], spec.dim)
        if not needs_graph((tokens, y, weights)):
            return self.kernels.finish(tokens, y, weights, spec, in_place).view(streams.shape)
        result: Tensor = _Finish.apply(link, tokens, y, weights, spec, self.kernels, origin).view(streams.shape)
        if origin is not None:
            origin.link_next(result, y, weights, spec, self.kernels)
        return result

    def mix(self, logits: Tensor, mixer: Mixer) -> Tensor:
        lead = logits.shape[: logits.ndim - len(mixer.logit_shape)]
        flat = logits.reshape(math.prod(lead), *mixer.logit_shape)
        res = _Mix.apply(flat, mixer, self.kernels) if needs_graph((flat,)) else self.kernels.mix(flat, mixer)
        return res.view(*lead, mixer.num_streams, mixer.num_streams)


def needs_graph(tensors: Sequence[Tensor | None]) -> bool:
    """Whether autograd has to know of an operation on these tensors."""
    # Forward-mode AD asks for what these functions do not have, and they must be there to say so.
    if forward_ad._current_level >= 0:
        return True
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def folded_of(
    weights: FoldedWeights | RawWeights, kernels: Kernels, spec: SiteSpec, dtype: torch.dtype
) -> FoldedWeights:
    """The weights folded, if they are not yet."""
    if isinstance(weights, FoldedWeights):
        return weights
    assert kernels.folding is not None
    return kernels.folding.fold(weights.tensors, spec, dtype)


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
        folded = FoldedWeights(*weights) if is_folded else kernels.folding.fold(weights, spec, streams.dtype)
        x, routed = kernels.begin(streams, folded, spec, mixer)
        link = streams.new_empty(()).expand(streams.shape)
        # Only inputs and outputs can be saved, so what was folded here is an output.
        return x, routed.weights, link, routed.z, routed.norms, *(() if is_folded else folded[:3])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        streams, ctx.spec, ctx.mixer, ctx.kernels, origin, ctx.is_folded, *weights = inputs
        _, routing, _, *small = output
        ctx.mark_non_differentiable(*small)
        ctx.set_materialize_grads(False)
        ctx.segment, own = origin or (None, (streams,))
        ctx.counts = len(weights), len(small) + 1
        ctx.save_for_backward(*weights, routing, *small, *own)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_x: Tensor | None, d_weights: Tensor | None, grad: Tensor | None, *_: None) -> Any:
        saved, (given, small) = ctx.saved_tensors, ctx.counts
        weights, own = saved[:given], saved[given + small :]
        routing, z, norms, *made = saved[given : given + small]
        folded = FoldedWeights(*(weights if ctx.is_folded else made))
        streams = own[0] if ctx.segment is None else ctx.segment.streams(*own)
        with no_autocast(streams):
            d_streams, d_folded = ctx.kernels.begin_backward(
                grad, d_x, d_weights, streams, folded, Routed(routing, z, norms), ctx.spec, ctx.mixer
            )
            gradients = d_folded[:3]
            if not ctx.is_folded:
                gradients = ctx.kernels.folding.fold_backward(d_folded, weights, ctx.spec, streams.dtype)
        if ctx.segment is not None:
            ctx.segment.drop()
        return d_streams, None, None, None, None, None, *gradients


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(
        link: Tensor | None,
        streams: Tensor,
        y: Tensor,
        weights: Tensor,
        spec: SiteSpec,
        kernels: Any,
        origin: Origin | None,
    ) -> Tensor:
        result: Tensor = kernels.finish(streams, y, weights, spec)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, streams, y, weights, ctx.spec, ctx.kernels, origin = inputs
        ctx.segment, own = origin or (None, (streams,))
        ctx.save_for_backward(y, weights, *own)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        y, weights, *own = ctx.saved_tensors
        streams = own[0] if ctx.segment is None else ctx.segment.streams(*own)
        with no_autocast(streams):
            d_y, d_weights = ctx.kernels.finish_backward(grad, streams, y, weights, ctx.spec)
        return grad if ctx.needs_input_grad[0] else None, None, d_y, d_weights, None, None, None


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
    """A signature whose `bind` assumes that every argument is given, by position.

    torch asks for the signature in every call; working it out and binding to it takes longer than a small kernel.
    """

    def bind(self, *args: Any, **kwargs: Any) -> Any:
        return _Bound(args, kwargs)


for _function in (_Begin, _Finish, _Mix):
    _known = inspect.signature(_function.forward)
    _function.forward.__signature__ = _PositionalSignature(list(_known.parameters.values()))  # type: ignore[union-attr]
