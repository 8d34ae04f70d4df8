"""The limit of Sinkhorn's iteration by Newton's method on its dual, with an implicit gradient.

With rows kept exact, P(b) = rowsoftmax(Z + b), the limit is where every column of P sums to 1: the minimum of the
convex f(b) = sum_m logsumexp_n(Z[m, n] + b[n]) - sum_n b[n]. Its Hessian, where rows sum to 1, is diag(c) - P^T P, the
Laplacian of a graph on the streams with weights P^T P. docs/math.md has the derivation.

Letters: N streams, leading dimensions are tokens. Rows are the axis that stays exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from temper.mixers.sinkhorn.scaling import has_values

# Plain rounds before the first step of Newton's, and the longest step: a softmax is flat far away.
WARM_UP, LONGEST = 4, 4.0
TINY = 1e-30


def solve(logits: Tensor, iters: int, tol: float) -> Tensor:
    """P with rows exact and columns within tol of 1, or as near as `iters` steps come: (..., N, N)."""
    return (logits + find(logits, iters, tol).unsqueeze(-2)).softmax(-1)


def find(logits: Tensor, iters: int, tol: float) -> Tensor:
    """The b (..., N) of that P."""
    shift = -logits.logsumexp(-2)
    for _ in range(WARM_UP):
        shift = _plain(shift, _look(logits, shift)[0].sum(-2))
    value, height = _look(logits, shift)
    largest = logits.abs().amax((-2, -1)).unsqueeze(-1)
    for _ in range(iters):
        sums = value.sum(-2)
        error = (sums - 1).abs().amax(-1, keepdim=True)
        done = error <= tol
        # While tracing, all steps run, with the same result.
        if has_values(done) and done.all():
            break
        step = solve_laplacian(value.mT @ value, 1 - sums)
        step = step - step.mean(-1, keepdim=True)
        step = step * (LONGEST / step.abs().amax(-1, keepdim=True).clamp_min(TINY)).clamp_max(1)
        trial, lower = _look(logits, shift + step)
        # Accept Newton's step if it lowers the objective, as a plain round always does; going by the error alone could
        # cycle. Near the minimum the decrease drowns in rounding, so the error decides there.
        rounding = 4 * torch.finfo(logits.dtype).eps * (shift.abs().sum(-1, keepdim=True) + largest)
        nearer = (trial.sum(-2) - 1).abs().amax(-1, keepdim=True) < error
        better = (lower < height) | (nearer & (lower < height + rounding))
        moved = torch.where(better, shift + step, _plain(shift, sums))
        shift = torch.where(done, shift, moved)
        value, height = _look(logits, shift)
    return shift


def vjp(res: Tensor, grad: Tensor) -> Tensor:
    """The gradient of the logits from that of the limit, by the implicit function theorem: (..., N, N)."""
    part = res * grad
    left, right = part.sum(-1), part.sum(-2)
    step = solve_laplacian(res.mT @ res, (res.mT @ left.unsqueeze(-1)).squeeze(-1) - right)
    level = left.unsqueeze(-1) + res @ step.unsqueeze(-1)
    return res * (grad - level + step.unsqueeze(-2))


def solve_laplacian(weights: Tensor, slope: Tensor) -> Tensor:
    """x with x[0] = 0 and sum_k weights[j, k] (x[j] - x[k]) = slope[j], where the slopes sum to 0.

    Nodes are eliminated one after another and nothing is ever subtracted from a weight (Grassmann, Taksar and Heyman),
    so entries keep their digits even where P is nearly a permutation and the Laplacian nearly zero.
    """
    n = slope.shape[-1]
    pivots: list[Tensor] = []
    lines: list[Tensor] = []
    slopes: list[Tensor] = []
    for k in range(n - 1, 0, -1):
        line, last = weights[..., k, :k], slope[..., k : k + 1]
        pivot = line.sum(-1, keepdim=True).clamp_min(TINY)
        share = line / pivot
        weights = weights[..., :k, :k] + share.unsqueeze(-1) * line.unsqueeze(-2)
        slope = slope[..., :k] + share * last
        pivots.append(pivot)
        lines.append(line)
        slopes.append(last)
    x = torch.zeros_like(slope[..., :1])
    for pivot, line, last in zip(reversed(pivots), reversed(lines), reversed(slopes), strict=True):
        x = torch.cat([x, (last + (line * x).sum(-1, keepdim=True)) / pivot], dim=-1)
    return x


def _look(logits: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """P at the shift, and the dual objective there."""
    shifted = logits + shift.unsqueeze(-2)
    height = shifted.logsumexp(-1).sum(-1, keepdim=True) - shift.sum(-1, keepdim=True)
    return shifted.softmax(-1), height


def _plain(shift: Tensor, sums: Tensor) -> Tensor:
    return shift - sums.clamp_min(TINY).log()
