"""The operations on streams in plain torch with backwards written by hand: any device, any dtype.

The streams are read once for all three generators, with the norm pulled out of the contraction. Their gradient is
written once: `finish_backward` leaves the part that came through mixing to `begin_backward`, which adds every other
part to it. Only the streams and y are saved in full; small tensors are recomputed.

Letters: T tokens, N streams, D features, R bottleneck rows, K = N^2 + 2N routing weights of a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from temper.ops.plan import NOT_STANDARD, FoldedWeights, Routed, SiteSpec
from temper.streams import widen

if TYPE_CHECKING:
    from temper.mixers.base import Mixer


name = "fused"
device: str | None = None
scope = "every other device and dtype, in torch with backwards written by hand"
folding = None


def refusal(spec: SiteSpec, mixer: Mixer, streams: Tensor, asked: bool) -> str | None:
    """Why this backend cannot run a site; None if it can."""
    if not spec.is_standard:
        return NOT_STANDARD
    if not mixer.has_vjp:
        return f"the {mixer.name} mixer has no `vjp` with these options"
    return None


def unavailable() -> str | None:
    """Always None: this backend runs on every machine."""
    return None


def limits() -> list[str]:
    """The sites it leaves to the next backend."""
    from temper.mixers import Mixer

    slow = [key for key, mixer in sorted(Mixer.members.items()) if mixer.vjp is Mixer.vjp]
    return [NOT_STANDARD, *slow, "sinkhorn with tol"]


def begin(streams_TND: Tensor, folded: FoldedWeights, spec: SiteSpec, mixer: Mixer) -> tuple[Tensor, Routed]:
    """x, and the routing with what is saved for the backward."""
    wide = widen(streams_TND)
    flat = wide.flatten(1)
    # The few rows on the left: a third faster on CPUs than the other way round.
    z_TR = (folded.in_map.flatten(1) @ flat.T).T.contiguous()
    mean = torch.linalg.vector_norm(flat, dim=-1, keepdim=True).square() / flat.shape[-1]
    base = mean.clamp_min(spec.norm_eps) if spec.norm_clamp else mean + spec.norm_eps
    rstd = base.rsqrt()
    slope = -rstd.pow(3) / flat.shape[-1]
    if spec.norm_clamp:
        slope = torch.where(mean < spec.norm_eps, 0.0, slope)
    pre, res, post = _logits(z_TR * rstd, folded, spec)
    pre, post = pre.sigmoid() + spec.pre_eps, 2 * post.sigmoid()
    weights = spec.pack(pre, mixer.forward_fast(res.unflatten(-1, mixer.logit_shape)), post)
    x = torch.bmm(pre.unsqueeze(1), wide).squeeze(1).to(streams_TND.dtype)
    return x, Routed(weights, z_TR, torch.cat([rstd, slope], dim=-1))


def finish(streams_TND: Tensor, y_TD: Tensor, weights_TK: Tensor, spec: SiteSpec, in_place: bool = False) -> Tensor:
    """The next streams: H'[m] = sum_n res[m, n] H[n] + post[m] y."""
    _, res, post = spec.split(weights_TK)
    written = post.unsqueeze(-1) * y_TD.to(weights_TK.dtype).unsqueeze(1)
    return written.baddbmm_(res, widen(streams_TND)).to(streams_TND.dtype)


def finish_backward(
    grad_TND: Tensor, streams_TND: Tensor, y_TD: Tensor, weights_TK: Tensor, spec: SiteSpec
) -> tuple[Tensor, Tensor]:
    """The gradients of y and of the routing weights; that of the streams is left to `begin_backward`."""
    pre, _, post = spec.split(weights_TK)
    grad = widen(grad_TND)
    d_y = torch.bmm(post.unsqueeze(1), grad).squeeze(1).to(y_TD.dtype)
    # A vector on the left: on the right, CPU libraries take ten times as long.
    d_post = torch.bmm(y_TD.to(grad.dtype).unsqueeze(1), grad.mT).squeeze(1)
    d_res = torch.bmm(grad, widen(streams_TND).mT)
    return d_y, spec.pack(torch.zeros_like(pre), d_res, d_post)


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
    """The gradients of the streams and of the folded weights.

    Args:
        grad_TND: the gradient of the next streams, passed on unchanged by `finish_backward`.
    """
    wide = widen(streams_TND)
    weights_TK, z_TR, norms_T2 = routed
    pre, res, post = spec.split(weights_TK)
    if d_weights_TK is None:
        d_weights_TK = torch.zeros_like(weights_TK)
    d_pre, d_res, d_post = spec.split(d_weights_TK)
    if d_x_TD is not None:
        d_x_TD = widen(d_x_TD)
        d_pre = d_pre + torch.bmm(d_x_TD.unsqueeze(1), wide.mT).squeeze(1)
    rstd, slope = norms_T2.split(1, dim=-1)
    bottleneck = z_TR * rstd
    logits = _logits(bottleneck, folded, spec)[1].unflatten(-1, mixer.logit_shape)
    gate = pre - spec.pre_eps
    d_logits = (
        d_pre * gate * (1 - gate),
        mixer.vjp(logits, res, d_res).flatten(1),
        d_post * post * (1 - post / 2),
    )
    rows, maps = bottleneck.split(spec.rows, dim=-1), folded.out.split(spec.map_sizes)
    d_out, d_rows = [], []
    for row, out, d_logit, direct in zip(rows, maps, d_logits, spec.direct, strict=True):
        if direct:
            d_rows.append(d_logit)
        else:
            d_rows.append(d_logit @ out.view(row.shape[-1], -1).T)
            d_out.append((row.T @ d_logit).flatten())
    d_bottleneck = torch.cat(d_rows, dim=-1)
    own = (d_bottleneck * z_TR).sum(-1, keepdim=True) * slope
    d_z = d_bottleneck * rstd
    # Accumulate all parts in one buffer, the cheapest to write first.
    in_map = folded.in_map.flatten(1)
    if d_x_TD is not None:
        d_streams = pre.unsqueeze(-1) * d_x_TD.unsqueeze(1)
        d_streams.view(-1, in_map.shape[1]).addmm_(d_z, in_map)
    else:
        d_streams = (d_z @ in_map).view(wide.shape)
    if grad_TND is not None:
        d_streams.baddbmm_(res.mT, widen(grad_TND))
    d_streams.addcmul_(wide, own.unsqueeze(-1))
    d_folded = FoldedWeights(
        (d_z.T @ wide.flatten(1)).view(folded.in_map.shape),
        torch.cat(d_out) if d_out else torch.zeros_like(folded.out),
        torch.cat(d_logits, dim=-1).sum(0),
    )
    return d_streams.to(streams_TND.dtype), d_folded


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
    next_TND = finish(streams_TND, y_TD, weights_TK, spec)
    return next_TND, *begin(next_TND, folded, spec, mixer)


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
    d_next, d_folded = begin_backward(grad_TND, d_x_TD, d_next_weights_TK, next_TND, folded, routed, spec, mixer)
    return d_next, d_folded, *finish_backward(d_next, streams_TND, y_TD, weights_TK, spec)


def mix(logits: Tensor, mixer: Mixer) -> Tensor:
    """res of logits (T, *logit_shape)."""
    return mixer.forward_fast(logits)


def mix_backward(logits: Tensor, res: Tensor, grad: Tensor, mixer: Mixer) -> Tensor:
    """The gradient of the logits."""
    return mixer.vjp(logits, res, grad)


def _logits(bottleneck_TR: Tensor, folded: FoldedWeights, spec: SiteSpec) -> tuple[Tensor, Tensor, Tensor]:
    rows, maps = bottleneck_TR.split(spec.rows, dim=-1), folded.out.split(spec.map_sizes)
    biases = folded.bias.split(spec.head_logits)
    pre, res, post = (
        bias + row if direct else torch.addmm(bias, row, out.view(row.shape[-1], -1))
        for row, out, bias, direct in zip(rows, maps, biases, spec.direct, strict=True)
    )
    return pre, res, post
