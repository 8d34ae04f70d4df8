"""Curves over seeds: means with their spread, smoothing, differences, and the Pareto frontier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from temper_lab.report.results import Curve, Run, Study
from temper_lab.report.statistics import mean, sd

# More points than this are not seen in a figure.
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
    """At the steps that all curves have; None if there are none."""
    tables = [dict(curve) for curve in curves]
    steps = sorted(set.intersection(*(set(table) for table in tables))) if tables else []
    if not steps:
        return None
    columns = [[table[step] for table in tables] for step in steps]
    spreads = [sd(column) for column in columns]
    sds = tuple(spread for spread in spreads if spread is not None)
    return Series(tuple(steps), tuple(mean(column) for column in columns), sds, len(tables))


def half_window(count: int) -> int:
    """How many neighbours on each side are averaged in a curve of so many points."""
    return 0 if count < 6 else max(1, count // 20)


def smooth(curve: Curve) -> Curve:
    """A moving average around each point. It narrows towards both ends, whose values stay what they are."""
    half, values = half_window(len(curve)), [value for _, value in curve]
    smoothed = []
    for place, (step, _) in enumerate(curve):
        reach = min(half, place, len(curve) - 1 - place)
        smoothed.append((step, mean(values[place - reach : place + reach + 1])))
    return tuple(smoothed)


def thin(curve: Curve) -> Curve:
    """At most `MOST` points, with the first and the last."""
    if len(curve) <= MOST:
        return curve
    return tuple(curve[round(place * (len(curve) - 1) / (MOST - 1))] for place in range(MOST))


def gap(runs: dict[int, Run], reference: dict[int, Run]) -> Series | None:
    """The smoothed difference in bpb to a reference with the same seeds, averaged over them."""
    curves = []
    for seed in sorted(runs.keys() & reference.keys()):
        other = dict(reference[seed].val)
        curves.append(smooth(tuple((step, value - other[step]) for step, value in runs[seed].val if step in other)))
    return average(curves)


def gap_reference(study: Study, streams: int) -> tuple[str, str] | None:
    """The method that gaps are taken to, and why; None if nothing finished."""
    finished = {label: runs for label in study.labels_at(streams) if (runs := study.measured(label, streams))}
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
    """The points that no other beats in one coordinate without being worse in the other; smaller is better."""
    best: list[tuple[float, float]] = []
    for point in sorted(set(points)):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    return best
