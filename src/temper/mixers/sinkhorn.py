"""Sinkhorn-Knopp: alternate normalisation of columns and rows (the mixing of mHC)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from temper.mixers.base import Mixer

# Sums over this axis of res (..., M, N) are the row sums, or the column sums.
AXES = {"rows": -1, "columns": -2}


class Sinkhorn(Mixer, name="sinkhorn"):
    """exp(logits), then `iters` times: columns to sum 1, then rows to sum 1.

    Computed in the log domain, so logits of any size give finite values and gradients. Rows are
    exact, columns as far as the iteration has converged (docs/math.md says how far that is).

    Args:
        iters: how many times both axes are normalised; 20 in the paper.
        tol: a token whose rows and columns all sum to 1 within `tol` is left as it is from then on.
            Every token stops by itself, so its result never depends on its neighbours.
        last: the axis normalised last and hence exact, "rows" or "columns".
        eps: DeepSeek-V4's guard, in the linear domain: added to the first normalised matrix and
            to every sum that is divided by.

    Reference: Sinkhorn, 1964; Xie et al., mHC, 2026.
    """

    doubly_stochastic = "rows"

    def __init__(
        self, num_streams: int, *, iters: int = 20, tol: float | None = None, last: str = "rows", eps: float = 0.0
    ) -> None:
        super().__init__(num_streams)
        if isinstance(iters, bool) or not isinstance(iters, int) or iters < 1:
            raise ValueError(f"sinkhorn iters is {iters!r}; expected a whole number >= 1")
        if tol is not None and not tol > 0:
            raise ValueError(f"sinkhorn tol is {tol!r}; expected a number > 0, or None to run every iteration")
        if last not in AXES:
            raise ValueError(f"sinkhorn last is {last!r}; expected 'rows' or 'columns'")
        if not 0 <= eps < 1:
            raise ValueError(f"sinkhorn eps is {eps!r}; expected 0 <= eps < 1")
        self.iters, self.tol, self.last, self.eps = iters, tol, last, eps

    @classmethod
    def logit_shape_for(cls, num_streams: int) -> tuple[int, ...]:
        return (num_streams, num_streams)

    @classmethod
    def flops(cls, num_streams: int, **options: Any) -> int:
        # Per entry and normalisation: shift, exp, add, subtract; and one exp at the end.
        return num_streams**2 * (8 * options.get("iters", 20) + 1)

    @classmethod
    def saved(cls, num_streams: int, **options: Any) -> int:
        # Input and sums of every normalisation, and the result.
        return 2 * options.get("iters", 20) * num_streams * (num_streams + 1) + num_streams**2

    def initial_bias(self) -> Tensor:
        return torch.full(self.logit_shape, -8.0).fill_diagonal_(0.0)

    def forward(self, logits: Tensor) -> Tensor:
        last = AXES[self.last]
        first = -3 - last
        one_round = self._guarded_round if self.eps else _log_round
        # What goes from round to round is log(res), or res itself where it is guarded by eps.
        value, done = logits, None
        for index in range(self.iters):
            step = one_round(value, first, last, index)
            value = step if done is None else torch.where(done, value, step)
            if self.tol is not None:
                # The axis normalised last is exact; a token that is done stays as it is, and so stays done.
                matrix = value.detach() if self.eps else value.detach().exp()
                done = ((matrix.sum(first, keepdim=True) - 1).abs() <= self.tol).all(last, keepdim=True)
                if _all(done):
                    break
        return value if self.eps else value.exp()

    def _guarded_round(self, value: Tensor, first: int, last: int, index: int) -> Tensor:
        start = index == 0
        value = value.softmax(first) + self.eps if start else value / (value.sum(first, keepdim=True) + self.eps)
        return value / (value.sum(last, keepdim=True) + self.eps)

    def extra_repr(self) -> str:
        return f"{self.num_streams}, iters={self.iters}, tol={self.tol}, last={self.last!r}, eps={self.eps}"


def _log_round(value: Tensor, first: int, last: int, index: int) -> Tensor:
    value = value - value.logsumexp(first, keepdim=True)
    return value - value.logsumexp(last, keepdim=True)


def _all(done: Tensor) -> bool:
    # A compiled graph cannot branch on values: there it runs all iterations, to the same result.
    return not torch.compiler.is_compiling() and not done.is_meta and bool(done.all())
