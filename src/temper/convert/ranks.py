"""Choice of ranks for a collection of tensors, given an error or a parameter budget."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from temper.convert.factorize import checked, checked_moment, dense, factorize, square
from temper.decompose.moment import Moment
from temper.decompose.path import slopes
from temper.generators import Generator
from temper.generators.base import Rank, count
from temper.registry import check_int

# A relative error below this is rounding.
ROUNDING = 1e-12


def ranks_for(
    weights: Sequence[Tensor],
    generator: str,
    *,
    error: float | None = None,
    params: int | None = None,
    moments: Sequence[Tensor] | None = None,
    weighting: Sequence[float] | None = None,
    **effort: Any,
) -> list[Rank]:
    """Ranks for which all tensors together meet an error or a parameter budget.

    Ranks grow in one fixed order, cheapest gain first, by estimates from singular values. A parameter
    budget selects the longest prefix of that order that fits. An error selects the shortest prefix whose true
    error, as `factorize` with the same `effort` gives it, is small enough. So more parameters
    never mean a lower rank anywhere.

    Args:
        error: at most this sqrt(sum ||W_i - What_i||^2 / sum ||W_i||^2); below 1e-12 it is rounding.
        params: at most this many parameters of all generators together, frozen ones too.
        moments: as for `factorize`, one for every weight; norms are then those on data.
        weighting: factors of the squares above, one for every weight, such as squared gates; 1 if None.
        effort: `seed`, `restarts`, `iters`, `tol` of `factorize`.
    """
    kind = Generator.named(generator)
    weights = [checked(weight) for weight in weights]
    if not weights:
        raise ValueError("no weights; expected at least one tensor (num_streams, dim, *out_modes)")
    if (error is None) == (params is None):
        raise ValueError(f"error is {error!r} and params is {params!r}; expected one of them")
    if moments is not None and len(moments) != len(weights):
        raise ValueError(f"{len(moments)} moments for {len(weights)} weights; expected one for each")
    order = _Order(kind, weights, moments, _shares(weighting, len(weights)), effort)
    if error is not None:
        return order.ranks(order.shortest(error))
    assert params is not None
    return order.ranks(order.longest(params))


class _Order:
    """All steps from the smallest ranks to full ones, in the order in which they are taken.

    A position k means that the first k steps have been taken.
    """

    def __init__(
        self,
        kind: type[Generator],
        weights: list[Tensor],
        moments: Sequence[Tensor] | None,
        shares: list[float],
        effort: dict[str, Any],
    ) -> None:
        self.kind, self.weights, self.shares, self.effort = kind, weights, shares, effort
        self.moments: list[Tensor | None] = list(moments) if moments is not None else [None] * len(weights)
        exact = [weight.detach().to("cpu", torch.float64) for weight in weights]
        self.measures = [
            None if moment is None else checked_moment(moment, weight)
            for moment, weight in zip(self.moments, exact, strict=True)
        ]
        self.norms = [square(weight, measure) for weight, measure in zip(exact, self.measures, strict=True)]
        self.paths = [
            _path(kind, weight, measure, norm)
            for weight, measure, norm in zip(exact, self.measures, self.norms, strict=True)
        ]
        self.sizes = [
            [_size(kind, weight, rank) for rank, _ in path] for weight, path in zip(weights, self.paths, strict=True)
        ]
        steps = []
        for i, (path, sizes) in enumerate(zip(self.paths, self.sizes, strict=True)):
            gains = slopes([(size, shares[i] * e) for size, (_, e) in zip(sizes, path, strict=True)])
            steps += [(-gain, i, k) for k, gain in enumerate(gains)]
        # Slopes decrease along a path, so the steps of a tensor stay in order.
        self.steps = [i for _, i, _ in sorted(steps)]
        self.gainful = sum(gain < 0 for gain, _, _ in steps)
        self.true: dict[tuple[int, int], float] = {}

    def places(self, position: int) -> list[int]:
        taken = Counter(self.steps[:position])
        return [taken[i] for i in range(len(self.weights))]

    def ranks(self, position: int) -> list[Rank]:
        return [path[place][0] for path, place in zip(self.paths, self.places(position), strict=True)]

    def parameters(self, position: int) -> int:
        return sum(sizes[place] for sizes, place in zip(self.sizes, self.places(position), strict=True))

    def _relative(self, errors: list[float]) -> float:
        total = sum(share * e for share, e in zip(self.shares, errors, strict=True))
        norm = sum(share * n for share, n in zip(self.shares, self.norms, strict=True))
        return math.sqrt(total / norm) if norm > 0 else 0.0

    def estimate(self, position: int) -> float:
        return self._relative([path[place][1] for path, place in zip(self.paths, self.places(position), strict=True)])

    def error(self, position: int) -> float:
        """The true error; each tensor is decomposed once per rank."""
        for key in enumerate(self.places(position)):
            if key not in self.true:
                i, place = key
                found = factorize(
                    self.weights[i], self.kind.name, self.paths[i][place][0], moment=self.moments[i], **self.effort
                )
                self.true[key] = square(self.weights[i].detach().cpu().double() - dense(found), self.measures[i])
        return self._relative([self.true[key] for key in enumerate(self.places(position))])

    def longest(self, params: int) -> int:
        check_int("params", params)
        smallest = self.parameters(0)
        if params < smallest:
            raise ValueError(
                f"{params:,} parameters are too few for {len(self.weights)} {self.kind.name} generators: "
                f"the smallest ranks take {smallest:,}"
            )
        # The last position may be one past the end; steps without an estimated gain are not taken.
        return _first(lambda k: k > self.gainful or self.parameters(k) > params, 0, self.gainful + 1) - 1

    def shortest(self, error: float) -> int:
        if isinstance(error, bool) or not isinstance(error, int | float) or not 0 <= error < math.inf:
            raise ValueError(f"error is {error!r}; expected a number >= 0, such as 0.1 for 10%")
        enough = max(error, ROUNDING)
        end = len(self.steps)

        def met(position: int) -> bool:
            return self.error(position) <= enough

        # Start at the position that the estimates suggest and search with doubling strides.
        at = _first(lambda k: self.estimate(k) <= enough, 0, end)
        stride = 1
        if met(at):
            low, high = at, at
            while low > 0 and met(low):
                low, high = max(0, low - stride), low
                stride *= 2
            return _first(met, low, high)
        low = high = at
        while high < end and not met(high):
            low, high = high + 1, min(end, high + stride)
            stride *= 2
        if not met(high):
            raise ValueError(
                f"an error of {error:g} is out of reach for {self.kind.name} generators: "
                f"full ranks leave {self.error(end):.3g}"
            )
        return _first(met, low, high)


def _first(holds: Callable[[int], bool], low: int, high: int) -> int:
    """Bisection: the first position in low..high where a monotone condition, true at high, holds."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return high


def _path(kind: type[Generator], weight: Tensor, measure: Tensor | None, norm: float) -> Sequence[tuple[Rank, float]]:
    """Ranks and estimated squared errors; with a moment, of W as it is seen if S separates."""
    if not weight.any() or norm == 0:
        return kind.rank_path(torch.zeros_like(weight))[:1]
    if measure is None:
        return kind.rank_path(weight)
    (by_stream, _), (by_feature, _) = Moment(measure.view(*weight.shape[:2], *weight.shape[:2])).roots()
    seen = torch.einsum("nm,dc,mc...->nd...", by_stream, by_feature, weight)
    scale = norm / seen.square().sum().item()
    return [(rank, scale * e) for rank, e in kind.rank_path(seen)]


def _size(kind: type[Generator], weight: Tensor, rank: Rank) -> int:
    modes = tuple(weight.shape)
    options = {"rank": rank} if kind.ranked else {}
    shapes = kind.shapes(modes[:2], modes[2:], **options), kind.frozen_shapes(modes[:2], modes[2:], **options)
    return sum(map(count, shapes))


def _shares(weighting: Sequence[float] | None, number: int) -> list[float]:
    shares = [1.0] * number if weighting is None else [float(share) for share in weighting]
    if len(shares) != number or not all(0 <= share < math.inf for share in shares):
        raise ValueError(f"weighting is {shares}; expected {number} finite numbers >= 0")
    return shares
