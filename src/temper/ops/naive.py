"""The operations that touch streams, written plainly: the oracle for every faster path.

Letters: N streams, M destination streams, D features, R bottleneck rows, K = N^2 + 2N routing weights of a token.
Everything is computed in the dtype of the streams: widen them first. Autograd does the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from temper.ops.plan import Fold, Plan

if TYPE_CHECKING:
    from temper.mixers.base import Mixer


def begin(streams: Tensor, fold: Fold, plan: Plan, mixer: Mixer) -> tuple[Tensor, Tensor]:
    """x (..., D) and the routing weights (..., K) of streams (..., N, D)."""
    mean = streams.square().mean((-2, -1), keepdim=True)
    rstd = (mean.clamp_min(plan.norm_eps) if plan.norm_clamp else mean + plan.norm_eps).rsqrt()
    rows = project(streams, fold.in_map, rstd).split(plan.rows, dim=-1)
    maps = fold.out.split(plan.map_sizes)
    biases = fold.bias.split(plan.logits_of)
    logits = [
        bias + (row if direct else row @ out.view(row.shape[-1], -1))
        for row, out, bias, direct in zip(rows, maps, biases, plan.direct, strict=True)
    ]
    pre, post = logits[0].sigmoid() + plan.pre_eps, 2 * logits[2].sigmoid()
    weights = plan.pack(pre, mixer.mix(logits[1].unflatten(-1, mixer.logit_shape)), post)
    return read(streams, pre), weights


def finish(streams: Tensor, y: Tensor, weights: Tensor, plan: Plan) -> Tensor:
    """The next streams (..., N, D)."""
    _, res, post = plan.split(weights)
    return write(streams, y, res, post)


def project(streams: Tensor, in_map: Tensor, rstd: Tensor) -> Tensor:
    """The bottleneck of normed streams: out[r] = sum_{n,d} rstd H[n, d] in_map[r, n, d].

    Shape:
        streams: (..., N, D), in_map: (R, N, D), rstd: (..., 1, 1) or (..., N, 1) -> (..., R).
    """
    weight = in_map.flatten(1).T
    if rstd.shape[-2] == 1:
        # One scale per token leaves the sum: the streams are read once and never copied.
        return (streams.flatten(-2) @ weight) * rstd.squeeze(-1)
    return (streams * rstd).flatten(-2) @ weight


def read(streams: Tensor, pre: Tensor) -> Tensor:
    """x = sum_n pre[n] H[n]: (..., N, D), (..., N) -> (..., D)."""
    return (pre.to(streams.dtype).unsqueeze(-2) @ streams).squeeze(-2)


def write(streams: Tensor, y: Tensor, res: Tensor, post: Tensor) -> Tensor:
    """H'[m] = sum_n res[m, n] H[n] + post[m] y: (..., N, D), (..., D), (..., M, N), (..., M) -> (..., M, D)."""
    dtype = streams.dtype
    return res.to(dtype) @ streams + post.to(dtype).unsqueeze(-1) * y.to(dtype).unsqueeze(-2)
