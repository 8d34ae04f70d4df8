"""Alternating minimisation from several starts, shared by all decompositions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from temper.registry import check_int

State = tuple[Tensor, ...]


@dataclass(frozen=True)
class Defaults:
    """Defaults of an effort: maximal sweeps, the gain at which to stop, sweeps per start."""

    iters: int
    tol: float
    trial: int


PLAIN = Defaults(iters=500, tol=1e-7, trial=10)
# A weighted sweep costs many plain ones, and the first start is their result.
WEIGHTED = Defaults(iters=30, tol=1e-5, trial=3)


@dataclass(frozen=True)
class Effort:
    """The effort of a search.

    Args:
        restarts: random starts beside those that the tensor itself suggests.
        iters: sweeps over all factors, at most; None for 500 plain ones, or 30 under a moment, which cost more.
        tol: stop when a sweep lowers the error by less than this share of it; None for 1e-7, or 1e-5 under a moment.
        seed: for the random starts.
        rounding: the relative rounding error of a stored number.
    """

    restarts: int = 2
    iters: int | None = None
    tol: float | None = None
    seed: int = 0
    rounding: float = 0.0

    def __post_init__(self) -> None:
        for name in ("restarts", "iters", "seed"):
            value = getattr(self, name)
            if name == "iters" and value is None:
                continue
            check_int(name, value)
        if self.tol is not None and not (isinstance(self.tol, int | float) and 0 <= self.tol < 1):
            raise ValueError(f"tol is {self.tol!r}; expected a number in [0, 1)")

    def random(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)


@dataclass
class Run:
    """The state of a descent; errors are squared."""

    state: State
    error: float
    done: bool = False


def best(
    starts: Iterable[State],
    sweep: Callable[[State], State],
    error: Callable[[State], float],
    effort: Effort,
    *,
    defaults: Defaults,
    exact: float,
    extrapolate: bool = False,
) -> State:
    """The state of least squared error: every start gets a few sweeps, the better half as many again, and so on.

    The result is never worse than any start, and the error never rises on the way.

    Args:
        defaults: for the fields that `effort` leaves open.
        exact: a squared error that is pure rounding; reaching it ends the search.
        extrapolate: also try a longer step in the direction of the last sweep (states must form a vector space).
    """
    sweeps = defaults.iters if effort.iters is None else effort.iters
    tol = defaults.tol if effort.tol is None else effort.tol

    def further(run: Run, more: int) -> Run:
        return _descend(run, sweep, error, more, tol, exact, extrapolate)

    spent = min(defaults.trial, sweeps)
    runs: list[Run] = []
    for start in starts:
        runs.append(further(Run(start, error(start)), spent))
        if runs[-1].error <= exact:
            return runs[-1].state
    while len(runs) > 1:
        runs = sorted(runs, key=lambda run: run.error)[: len(runs) // 2]
        more = min(spent, sweeps - spent)
        runs, spent = [further(run, more) for run in runs], spent + more
    return further(runs[0], sweeps - spent).state


def _descend(
    run: Run,
    sweep: Callable[[State], State],
    error: Callable[[State], float],
    sweeps: int,
    tol: float,
    exact: float,
    extrapolate: bool,
) -> Run:
    stride = 1.0
    for _ in range(sweeps):
        if run.done or run.error <= exact:
            break
        state = sweep(run.state)
        found = error(state)
        # Also true for NaN, which is never better.
        if not found < run.error:
            return Run(run.state, run.error, done=True)
        if extrapolate:
            ahead = tuple(new + stride * (new - old) for old, new in zip(run.state, state, strict=True))
            further = error(ahead)
            stride = min(1.5 * stride, 50.0) if further < found else max(stride / 3, 0.5)
            if further < found:
                state, found = ahead, further
        # Errors are squared, so a relative tolerance counts twice.
        run = Run(state, found, done=run.error - found <= 2 * tol * run.error)
    return run
