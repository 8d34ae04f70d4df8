"""The operations on streams in plain torch with backwards written by hand: any device, any dtype.

The streams are read once for all three generators, with the norm pulled out of the contraction. Their gradient is
written once: `finish_backward` leaves the part that came through mixing to `begin_backward`, which adds every other
part to it. Nothing large is kept but the streams and y, and what is small is made again.

Letters: T tokens, N streams, D features, R bottleneck rows, K = N^2 + 2N routing weights of a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from temper.ops.plan import Fold, Plan
from temper.precision import widen

if TYPE_CHECKING:
    from temper.mixers.base import Mixer


class Begun(NamedTuple):
    """What `begin` makes: x, the routing weights, and what its backward wants kept.

    Shape:
        x: (T, D), weights: (T, K), z: (T, R) the bottleneck before the norm, norms: (T, 2) with rstd and
        the factor of H in the gradient of rstd.
    """

    x: Tensor
    weights: Tensor
    z: Tensor
    norms: Tensor


def serves(plan: Plan, mixer: Mixer, dtype: torch.dtype) -> bool:
    """Whether this implementation can do what the site asks for."""
    return mixer.has_pull


def begin(streams_TND: Tensor, fold: Fold, plan: Plan, mixer: Mixer) -> Begun:
    """x, the routing weights and what is kept for the backward."""
    wide = widen(streams_TND)
    flat = wide.flatten(1)
    # The few rows on the left: a third faster on CPUs than the other way round.
    z_TR = (fold.in_map.flatten(1) @ flat.T).T.contiguous()
    mean = torch.linalg.vector_norm(flat, dim=-1, keepdim=True).square() / flat.shape[-1]
    base = mean.clamp_min(plan.norm_eps) if plan.norm_clamp else mean + plan.norm_eps
    rstd = base.rsqrt()
    slope = -rstd.pow(3) / flat.shape[-1]
    if plan.norm_clamp:
        slope = torch.where(mean < plan.norm_eps, 0.0, slope)
    pre, res, post = _logits(z_TR * rstd, fold, plan)
    pre, post = pre.sigmoid() + plan.pre_eps, 2 * post.sigmoid()
    weights = plan.pack(pre, mixer.solve(res.unflatten(-1, mixer.logit_shape)), post)
    x = torch.bmm(pre.unsqueeze(1), wide).squeeze(1).to(streams_TND.dtype)
    return Begun(x, weights, z_TR, torch.cat([rstd, slope], dim=-1))


def finish(streams_TND: Tensor, y_TD: Tensor, weights_TK: Tensor, plan: Plan) -> Tensor:
    """The next streams: H'[m] = sum_n res[m, n] H[n] + post[m] y."""
    _, res, post = plan.split(weights_TK)
    written = post.unsqueeze(-1) * y_TD.to(weights_TK.dtype).unsqueeze(1)
    return written.baddbmm_(res, widen(streams_TND)).to(streams_TND.dtype)


def finish_backward(
    grad_TND: Tensor, streams_TND: Tensor, y_TD: Tensor, weights_TK: Tensor, plan: Plan
) -> tuple[Tensor, Tensor]:
    """The gradients of y and of the routing weights; that of the streams is left to `begin_backward`."""
    pre, _, post = plan.split(weights_TK)
    grad = widen(grad_TND)
    d_y = torch.bmm(post.unsqueeze(1), grad).squeeze(1).to(y_TD.dtype)
    # A vector on the left: on the right, CPU libraries take ten times as long.
    d_post = torch.bmm(y_TD.to(grad.dtype).unsqueeze(1), grad.mT).squeeze(1)
    d_res = torch.bmm(grad, widen(streams_TND).mT)
    return d_y, plan.pack(torch.zeros_like(pre), d_res, d_post)


def begin_backward(
    grad_TND: Tensor | None,
    d_x_TD: Tensor | None,
    d_weights_TK: Tensor | None,
    streams_TND: Tensor,
    fold: Fold,
    weights_TK: Tensor,
    z_TR: Tensor,
    norms_T2: Tensor,
    plan: Plan,
    mixer: Mixer,
) -> tuple[Tensor, Fold]:
    """The gradients of the streams and of the folded weights.

    Args:
        grad_TND: of the next streams, passed on by `finish_backward` as it came.
    """
    wide = widen(streams_TND)
    pre, res, post = plan.split(weights_TK)
    if d_weights_TK is None:
        d_weights_TK = torch.zeros_like(weights_TK)
    d_pre, d_res, d_post = plan.split(d_weights_TK)
    if d_x_TD is not None:
        d_x_TD = widen(d_x_TD)
        d_pre = d_pre + torch.bmm(d_x_TD.unsqueeze(1), wide.mT).squeeze(1)
    rstd, slope = norms_T2.split(1, dim=-1)
    bottleneck = z_TR * rstd
    logits = _logits(bottleneck, fold, plan)[1].unflatten(-1, mixer.logit_shape)
    gate = pre - plan.pre_eps
    d_logits = (
        d_pre * gate * (1 - gate),
        mixer.pull(logits, res, d_res).flatten(1),
        d_post * post * (1 - post / 2),
    )
    rows, maps = bottleneck.split(plan.rows, dim=-1), fold.out.split(plan.map_sizes)
    d_out, d_rows = [], []
    for row, out, d_logit, direct in zip(rows, maps, d_logits, plan.direct, strict=True):
        if direct:
            d_rows.append(d_logit)
        else:
            d_rows.append(d_logit @ out.view(row.shape[-1], -1).T)
            d_out.append((row.T @ d_logit).flatten())
    d_bottleneck = torch.cat(d_rows, dim=-1)
    own = (d_bottleneck * z_TR).sum(-1, keepdim=True) * slope
    d_z = d_bottleneck * rstd
    # All parts into one buffer, the cheapest to write first.
    in_map = fold.in_map.flatten(1)
    if d_x_TD is not None:
        d_streams = pre.unsqueeze(-1) * d_x_TD.unsqueeze(1)
        d_streams.view(-1, in_map.shape[1]).addmm_(d_z, in_map)
    else:
        d_streams = (d_z @ in_map).view(wide.shape)
    if grad_TND is not None:
        d_streams.baddbmm_(res.mT, widen(grad_TND))
    d_streams.addcmul_(wide, own.unsqueeze(-1))
    d_fold = Fold(
        (d_z.T @ wide.flatten(1)).view(fold.in_map.shape),
        torch.cat(d_out) if d_out else torch.zeros_like(fold.out),
        torch.cat(d_logits, dim=-1).sum(0),
    )
    return d_streams.to(streams_TND.dtype), d_fold


def mix(logits: Tensor, mixer: Mixer) -> Tensor:
    """res of logits (T, *logit_shape)."""
    return mixer.solve(logits)


def mix_backward(logits: Tensor, res: Tensor, grad: Tensor, mixer: Mixer) -> Tensor:
    """The gradient of the logits."""
    return mixer.pull(logits, res, grad)


def _logits(bottleneck_TR: Tensor, fold: Fold, plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
    rows, maps = bottleneck_TR.split(plan.rows, dim=-1), fold.out.split(plan.map_sizes)
    biases = fold.bias.split(plan.logits_of)
    pre, res, post = (
        bias + row if direct else torch.addmm(bias, row, out.view(row.shape[-1], -1))
        for row, out, bias, direct in zip(rows, maps, biases, plan.direct, strict=True)
    )
    return pre, res, post
