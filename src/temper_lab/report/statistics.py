"""Paired comparisons of a few seeds: Student's t and Holm's correction, without scipy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

CONFIDENCE = 0.95


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def sd(values: Sequence[float]) -> float | None:
    """The standard deviation of a sample; None for fewer than two values."""
    if len(values) < 2:
        return None
    centre = mean(values)
    return math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1))


@dataclass(frozen=True)
class Mean:
    """The mean of a sample of at least two values, as Student's t knows it.

    Args:
        error: the standard error.
        degrees: of freedom.
    """

    value: float
    error: float
    degrees: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        spread = sd(values)
        if spread is None:
            raise ValueError(f"expected at least two values, got {len(values)}")
        return cls(mean(values), spread / math.sqrt(len(values)), len(values) - 1)

    def interval(self, confidence: float = CONFIDENCE) -> tuple[float, float]:
        """The two-sided confidence interval; each end is a one-sided bound of level (1 + confidence) / 2."""
        half = t_quantile(0.5 + confidence / 2, self.degrees) * self.error
        return self.value - half, self.value + half

    def p_below(self, bound: float) -> float:
        """One-sided p value of the hypothesis that the true mean is `bound` or more: small if it is below."""
        if self.error == 0:
            return 0.0 if self.value < bound else 1.0
        t = (self.value - bound) / self.error
        return t_tail(-t, self.degrees) if t < 0 else 1 - t_tail(t, self.degrees)

    def p_above(self, bound: float) -> float:
        """One-sided p value of the hypothesis that the true mean is `bound` or less."""
        return Mean(-self.value, self.error, self.degrees).p_below(-bound)


@dataclass(frozen=True)
class Paired:
    """The mean of paired differences; the interval and p are None for a single pair.

    Args:
        low, high: the 95% confidence interval of the mean.
        p: two-sided, that the true mean is 0.
    """

    mean: float
    pairs: int
    low: float | None
    high: float | None
    p: float | None

    @classmethod
    def of(cls, differences: Sequence[float]) -> Paired:
        count = len(differences)
        if count < 2:
            return cls(mean(differences), count, None, None, None)
        sample = Mean.of(differences)
        p = 1.0 if sample.value == 0 else 2 * min(sample.p_below(0), sample.p_above(0))
        return cls(sample.value, count, *sample.interval(), p)


def holm(ps: Sequence[float]) -> list[float]:
    """p values corrected for their number by Holm's step-down procedure."""
    adjusted, largest = [0.0] * len(ps), 0.0
    for place, index in enumerate(sorted(range(len(ps)), key=lambda index: ps[index])):
        # Never below that of a smaller p.
        largest = max(largest, min(1.0, (len(ps) - place) * ps[index]))
        adjusted[index] = largest
    return adjusted


def t_tail(t: float, degrees: float) -> float:
    """The probability that Student's t exceeds t >= 0."""
    assert t >= 0
    assert degrees > 0
    return 0.5 * _beta(degrees / 2, 0.5, degrees / (degrees + t * t), t * t / (degrees + t * t))


@cache
def t_quantile(probability: float, degrees: float) -> float:
    """The value that Student's t stays below with this probability."""
    if not 0 < probability < 1 or degrees <= 0:
        raise ValueError(f"expected a probability between 0 and 1 and degrees > 0, got {probability} and {degrees}")
    if probability < 0.5:
        return -t_quantile(1 - probability, degrees)
    tail, low, high = 1 - probability, 0.0, 1.0
    while t_tail(high, degrees) > tail:
        low, high = high, 2 * high
    # Bisection to the last bit: it cannot miss, and nobody waits for it.
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if t_tail(middle, degrees) > tail else (low, middle)
    return high


def _beta(a: float, b: float, x: float, y: float) -> float:
    """The regularized incomplete beta function of x = 1 - y, by its continued fraction."""
    if x <= 0 or y <= 0:
        return float(y <= 0)
    if x > (a + 1) / (a + b + 2):
        # The fraction converges fast on the other side.
        return 1 - _beta(b, a, y, x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(y)) / a
    # Evaluated from the front as Lentz does: the ratios of successive numerators and denominators.
    tiny = 1e-300
    value, upper, lower = 1.0, 1.0, 0.0
    for index in range(10_000):
        k = index // 2
        if index == 0:
            term = 1.0
        elif index % 2:
            term = -(a + k) * (a + b + k) * x / ((a + 2 * k) * (a + 2 * k + 1))
        else:
            term = k * (b - k) * x / ((a + 2 * k - 1) * (a + 2 * k))
        lower = 1 / ((1 + term * lower) or tiny)
        upper = (1 + term / upper) or tiny
        value *= upper * lower
        if abs(upper * lower - 1) < 1e-16:
            break
    return front * (value - 1)
