"""Sinkhorn-Knopp: alternate normalisation of columns and rows (the mixing of mHC)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from temper.mixers.base import Growth, Mixer, copy_map
from temper.mixers.sinkhorn import newton, scaling
from temper.ops.plan import MixerSpec
from temper.registry import check_int, unknown

# Sums over this axis of res (..., M, N) are the row sums, or the column sums.
AXES = {"rows": -1, "columns": -2}
METHODS = ("plain", "newton")


class Sinkhorn(Mixer, name="sinkhorn"):
    """exp(logits), then `iters` times: columns to sum 1, then rows to sum 1.

    Logits of any size give finite values and gradients. Rows are exact, columns as far as the iteration has
    converged (docs/math.md says how far that is); the method "newton" goes to the limit.

    Args:
        iters: how many times both axes are normalised; 20 in the paper. The most steps of "newton".
        tol: a token whose rows and columns all sum to 1 within `tol` is left as it is from then on.
            Every token stops by itself, so its result never depends on its neighbours. For "newton" 2e-6
            (1e-12 in float64) unless given.
        last: the axis normalised last and hence exact, "rows" or "columns".
        eps: DeepSeek-V4's guard, in the linear domain: added to the first normalised matrix and
            to every sum that is divided by.
        clamp: use eps as a lower limit of every sum instead of adding it: Megatron-Core's guard.
        method: "plain", or "newton": what the plain iteration converges to, with the gradient of that limit.

    Reference: Sinkhorn, 1964; Xie et al., mHC, 2026.
    """

    def __init__(
        self,
        num_streams: int,
        *,
        iters: int = 20,
        tol: float | None = None,
        last: str = "rows",
        eps: float = 0.0,
        clamp: bool = False,
        method: str = "plain",
    ) -> None:
        super().__init__(num_streams)
        check_int("sinkhorn iters", iters, 1)
        if tol is not None and not tol > 0:
            raise ValueError(f"sinkhorn tol is {tol!r}; expected a number > 0, or None to run every iteration")
        if last not in AXES:
            raise ValueError(f"sinkhorn last is {last!r}; expected 'rows' or 'columns'")
        if not 0 <= eps < 1:
            raise ValueError(f"sinkhorn eps is {eps!r}; expected 0 <= eps < 1")
        if not isinstance(clamp, bool):
            raise ValueError(f"sinkhorn clamp is {clamp!r}; expected True or False")
        if clamp and not eps:
            raise ValueError("sinkhorn clamp needs eps, the least that a sum may be; expected eps > 0")
        if method not in METHODS:
            raise unknown("sinkhorn method", method, METHODS)
        if method == "newton" and eps:
            raise ValueError(f"sinkhorn eps is {eps!r} with method 'newton'; the limit needs no guard: leave eps at 0")
        self.iters, self.tol, self.last, self.method = iters, tol, last, method
        self.eps, self.clamp = eps, clamp
        # The guard keeps even the axis normalised last from summing to one, by about eps.
        self.row_stochastic = "exact" if last == "rows" and not eps else "limit"
        self.column_stochastic = "exact" if last == "columns" and not eps else "limit"

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

    def grow(self, bias: Tensor, copies: int) -> Growth:
        if self.eps:
            raise ValueError(
                f"sinkhorn with eps={self.eps} does not grow: the guard weighs otherwise in a larger matrix"
            )
        # Every round on K (x) V is that round on K (x) that round on V, and rows of V sum to one at the end.
        apart = torch.full((copies, copies), -8.0).fill_diagonal_(0.0).to(bias)
        repeat = copy_map(self.num_streams, copies)
        return Growth((repeat, repeat), bias.repeat(copies, copies) + torch.kron(apart, torch.ones_like(bias)))

    def mix(self, logits: Tensor) -> Tensor:
        return self._limit(logits) if self.method == "newton" else self._rounds(logits)

    def _rounds(self, logits: Tensor) -> Tensor:
        last = AXES[self.last]
        first = -3 - last
        one_round = self._clamped_round if self.clamp else self._guarded_round if self.eps else _log_round
        # Rounds pass on log(res), or res itself if it is guarded by eps.
        value, done = logits, None
        for index in range(self.iters):
            step = one_round(value, first, last, index)
            value = step if done is None else torch.where(done, value, step)
            if self.tol is not None:
                # The axis normalised last is exact; a converged token is frozen and stays converged.
                matrix = value.detach() if self.eps else value.detach().exp()
                done = ((matrix.sum(first, keepdim=True) - 1).abs() <= self.tol).all(last, keepdim=True)
                # While tracing, all rounds run, with the same result.
                if scaling.has_values(done) and done.all():
                    break
        return value if self.eps else value.exp()

    def _limit(self, logits: Tensor) -> Tensor:
        limit: Tensor = _Limit.apply(self._turn(logits), self.iters, self._tol(logits.dtype))
        return self._turn(limit)

    def _tol(self, dtype: torch.dtype) -> float:
        return self.tol or (2e-6 if dtype == torch.float32 else 1e-12)

    def _turn(self, matrix: Tensor) -> Tensor:
        """Transposes so that the exact axis becomes the rows, if it is the columns; its own inverse."""
        return matrix if self.last == "rows" else matrix.mT

    def forward_fast(self, logits: Tensor) -> Tensor:
        if self.method == "newton":
            return self._turn(newton.solve(self._turn(logits), self.iters, self._tol(logits.dtype)))
        if self.clamp:
            return self._rounds(logits)
        tokens_last = self._turn(logits).movedim(0, -1)
        if self.eps:
            res = scaling.solve_guarded(tokens_last, self.iters, self.eps)
        else:
            res = scaling.solve(tokens_last.contiguous(), self.iters)
        return self._turn(res.movedim(-1, 0))

    def vjp(self, logits: Tensor, res: Tensor, grad: Tensor) -> Tensor:
        if self.method == "newton":
            return self._turn(newton.vjp(self._turn(res), self._turn(grad)))
        tokens_last, slope = (self._turn(tensor).movedim(0, -1).contiguous() for tensor in (logits, grad))
        if self.eps:
            gradient = scaling.vjp_guarded(tokens_last, slope, self.iters, self.eps)
        else:
            gradient = scaling.vjp(tokens_last, slope, self.iters)
        return self._turn(gradient.movedim(-1, 0))

    @property
    def has_vjp(self) -> bool:
        return self.method == "newton" or (self.tol is None and not self.clamp)

    def lipschitz(self) -> float:
        """At fixed column sums: the entropy is 2-strongly convex on matrices whose rows sum to one (docs/math.md)."""
        return 0.5

    def slack(self, logits: Tensor, res: Tensor, other_logits: Tensor, other_res: Tensor) -> Tensor:
        """Accounts for columns that have not converged and sum to different numbers, and for what eps adds."""
        one, far = self._scaled(logits, res)
        two, other_far = self._scaled(other_logits, other_res)
        sums = (one.sum(-2) - two.sum(-2)).abs().sum(-1)
        return ((self.num_streams - 1) / 2) ** 0.5 * sums + far + other_far

    def _scaled(self, logits: Tensor, res: Tensor) -> tuple[Tensor, Tensor]:
        """The unguarded scaling, transposed if last="columns", and ||res - scaling||."""
        # Without the guard that is res itself.
        near = Sinkhorn(self.num_streams, iters=self.iters, last=self.last).mix(logits) if self.eps else res
        return self._turn(near), torch.linalg.matrix_norm(res - near)

    def native(self) -> MixerSpec | None:
        if self.clamp or (self.eps and self.tol is not None):
            return None
        kind = "newton" if self.method == "newton" else "guarded" if self.eps else "sinkhorn"
        return MixerSpec(kind, iters=self.iters, last_columns=self.last == "columns", tol=self.tol or 0.0, eps=self.eps)

    def _guarded_round(self, value: Tensor, first: int, last: int, index: int) -> Tensor:
        start = index == 0
        value = value.softmax(first) + self.eps if start else value / (value.sum(first, keepdim=True) + self.eps)
        return value / (value.sum(last, keepdim=True) + self.eps)

    def _clamped_round(self, value: Tensor, first: int, last: int, index: int) -> Tensor:
        if index == 0:
            value = (value - value.amax(first, keepdim=True)).exp()
        for axis in (first, last):
            value = value / value.sum(axis, keepdim=True).clamp_min(self.eps)
        return value

    def extra_repr(self) -> str:
        options = ("iters", "tol", "last", "eps", "clamp", "method")
        return ", ".join([str(self.num_streams), *(f"{name}={getattr(self, name)!r}" for name in options)])


def _log_round(value: Tensor, first: int, last: int, index: int) -> Tensor:
    value = value - value.logsumexp(first, keepdim=True)
    return value - value.logsumexp(last, keepdim=True)


class _Limit(torch.autograd.Function):
    """Newton's method with the gradient of its limit; the backward is plain torch and can be differentiated again."""

    @staticmethod
    def forward(logits: Tensor, iters: int, tol: float) -> Tensor:
        return newton.solve(logits, iters, tol)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (limit,) = ctx.saved_tensors
        return newton.vjp(limit, grad), None, None
