"""Numbers over seeds: means, paired comparisons with Student's t and Holm's correction, and curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from temper_lab.report.view import StudyView
    from temper_lab.study.results import Curve, Run

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
    """The mean of a sample of at least two values, for Student's t.

    Args:
        error: the standard error.
        degrees: the degrees of freedom.
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
        # A corrected p is never below that of a smaller p.
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
    # Bisection to the last bit is robust, and fast enough.
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if t_tail(middle, degrees) > tail else (low, middle)
    return high


def _beta(a: float, b: float, x: float, y: float) -> float:
    """The regularized incomplete beta function of x = 1 - y, by its continued fraction."""
    if x <= 0 or y <= 0:
        return float(y <= 0)
    if x > (a + 1) / (a + b + 2):
        # On this side the fraction of the complement converges fast.
        return 1 - _beta(b, a, y, x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(y)) / a
    # Lentz's method: evaluated forward by the ratios of successive numerators and denominators.
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


# A figure does not show more points than this.
MOST = 400


@dataclass(frozen=True)
class Series:
    """A mean over seeds along the steps; `sds` is empty for a single seed."""

    steps: tuple[int, ...]
    means: tuple[float, ...]
    sds: tuple[float, ...]
    seeds: int

    @property
    def low(self) -> tuple[float, ...]:
        return tuple(centre - spread for centre, spread in zip(self.means, self.sds, strict=bool(self.sds)))

    @property
    def high(self) -> tuple[float, ...]:
        return tuple(centre + spread for centre, spread in zip(self.means, self.sds, strict=bool(self.sds)))


def average(curves: Sequence[Curve]) -> Series | None:
    """The mean of some curves at the steps that all of them have; None if there are none."""
    tables = [dict(curve) for curve in curves]
    steps = sorted(set.intersection(*(set(table) for table in tables))) if tables else []
    if not steps:
        return None
    columns = [[table[step] for table in tables] for step in steps]
    spreads = [sd(column) for column in columns]
    sds = tuple(spread for spread in spreads if spread is not None)
    return Series(tuple(steps), tuple(mean(column) for column in columns), sds, len(tables))


def half_window(count: int) -> int:
    """The number of neighbours on each side to average in a curve, given its number of points."""
    return 0 if count < 6 else max(1, count // 20)


def smooth(curve: Curve) -> Curve:
    """A moving average around each point. It narrows towards both ends, whose values do not change."""
    half, values = half_window(len(curve)), [value for _, value in curve]
    smoothed = []
    for place, (step, _) in enumerate(curve):
        reach = min(half, place, len(curve) - 1 - place)
        smoothed.append((step, mean(values[place - reach : place + reach + 1])))
    return tuple(smoothed)


def thin(curve: Curve) -> Curve:
    """A curve reduced to at most `MOST` points, with the first and the last."""
    if len(curve) <= MOST:
        return curve
    return tuple(curve[round(place * (len(curve) - 1) / (MOST - 1))] for place in range(MOST))


def gap(runs: dict[int, Run], reference: dict[int, Run]) -> Series | None:
    """The smoothed difference in bpb from a reference with the same seeds, averaged over them."""
    curves = []
    for seed in sorted(runs.keys() & reference.keys()):
        other = dict(reference[seed].val.curve("bpb"))
        curves.append(
            smooth(tuple((step, value - other[step]) for step, value in runs[seed].val.curve("bpb") if step in other))
        )
    return average(curves)


def gap_reference(study: StudyView, num_streams: int) -> tuple[str, str] | None:
    """The reference method of the gaps, and the reason; None if nothing finished."""
    finished = {label: runs for label in study.labels_at(num_streams) if (runs := study.measured(label, num_streams))}
    if not finished:
        return None
    if "temper-tucker" in finished:
        return "temper-tucker", "as in the paper"
    tempers = [label for label in finished if study.preset_of[label].startswith("temper")]
    if tempers:
        best = min(tempers, key=lambda label: mean([run.bpb or 0.0 for run in finished[label].values()]))
        return best, "the best TEMPER method here, for temper-tucker has no finished run"
    return list(finished)[-1], "the last method, for no TEMPER method has a finished run"


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The Pareto frontier: points that no other dominates; smaller is better."""
    best: list[tuple[float, float]] = []
    for point in sorted(set(points)):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    return best


ONE_SEED = "one seed: no statement"
NO_PAIR = "no common seed"
VERDICTS = ("better", "worse", "within noise", ONE_SEED, NO_PAIR)


@dataclass(frozen=True)
class Comparison:
    """bpb of a method minus bpb of the baseline, seed by seed; below 0 is better.

    Args:
        differences: the differences by seed.
        paired: None without a common seed.
        p_holm: corrected for all comparisons with the same baseline at the same N and settings.
        settings: the varied fields of the runs, on both sides.
    """

    against: str
    label: str
    num_streams: int
    differences: dict[int, float]
    paired: Paired | None
    p_holm: float | None
    verdict: str
    settings: Mapping[str, Any] = field(default_factory=dict)


def baselines(study: StudyView) -> list[str]:
    """Residual and mhc, as far as they have finished runs."""
    mhc = "mhc" if "mhc" in study.labels else next((run.method for run in study.runs if run.preset == "mhc"), None)
    candidates = [label for label in (study.baseline, mhc) if label is not None]
    return [label for label in candidates if any(study.measured(label, n) for n in study.streams)]


def compare(study: StudyView, against: str) -> list[Comparison]:
    """One comparison for each method and N in which both have finished."""
    return [one for n in study.streams for one in _compare_at(study, against, n)]


def _compare_at(study: StudyView, against: str, num_streams: int) -> list[Comparison]:
    reference = study.measured(against, num_streams)
    rows = []
    for label in study.labels_at(num_streams):
        runs = study.measured(label, num_streams)
        if label == against or not runs or not reference:
            continue
        seeds = sorted(runs.keys() & reference.keys())
        # `measured` has a bpb for each.
        differences = {seed: (runs[seed].bpb or 0.0) - (reference[seed].bpb or 0.0) for seed in seeds}
        rows.append((label, differences, Paired.of(list(differences.values())) if seeds else None))
    corrected = iter(holm([paired.p for *_, paired in rows if paired is not None and paired.p is not None]))
    comparisons = []
    for label, differences, paired in rows:
        p = next(corrected) if paired is not None and paired.p is not None else None
        verdict = _verdict(paired, p)
        comparisons.append(Comparison(against, label, num_streams, differences, paired, p, verdict, study.here))
    return comparisons


def _verdict(paired: Paired | None, p_holm: float | None) -> str:
    if paired is None:
        return NO_PAIR
    if p_holm is None:
        return ONE_SEED
    if p_holm >= 1 - CONFIDENCE:
        return "within noise"
    return "better" if paired.mean < 0 else "worse"


def explanation(comparisons: Sequence[Comparison]) -> list[str]:
    """An explanation of these numbers for readers who are not statisticians."""
    pairs = sorted({row.paired.pairs for row in comparisons if row.paired is not None})
    lines = [
        "Runs of the same seed see the same data in the same order, so methods are compared seed by seed: "
        "bpb of the method minus bpb of the baseline, averaged over the seeds. Below 0 is better.",
        "The interval is the 95% confidence interval of that mean (Student t on the paired differences). "
        "The verdict is corrected for the number of comparisons with the same baseline at the same N (Holm): "
        "it says better or worse only if the corrected p is below 0.05, so an interval may leave out 0 and the verdict "
        "still be within noise.",
    ]
    few = [count for count in pairs if 2 <= count <= 4]
    if few:
        times = " and ".join(f"{t_quantile(0.5 + CONFIDENCE / 2, n - 1):.1f} for {n} pairs" for n in few)
        lines.append(
            f"Few seeds make wide intervals: the half width is the standard error times {times} "
            "(with many it would be 2.0). Within noise does not mean equal: it means that these seeds cannot tell, "
            "and the interval says how large a difference they would have missed."
        )
    if 1 in pairs:
        lines.append("With a single common seed there is nothing to measure noise with, so there is no statement.")
    return lines
