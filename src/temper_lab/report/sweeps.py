"""Figures of parameters against N, and of studies that vary one option or N."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import temper
from temper_lab.ranks import show_rank
from temper_lab.report.charts import Axis, Chart, Mark, Panel, Rule, file_name
from temper_lab.report.counts import added, option
from temper_lab.report.formats import Row, Table
from temper_lab.report.results import Run, Study
from temper_lab.report.styles import styles

NUMBERS = (2, 4, 8, 16)


def parameters(study: Study) -> Chart | None:
    """Counted parameters against N at the study's size, for every preset, with what was trained marked."""
    if study.size is None:
        return None
    width, sites = study.size
    methods: dict[str, tuple[str, Mapping[str, Any]]] = {name: (name, {}) for name in temper.PRESETS}
    methods |= {run.label: (run.preset, run.options) for run in study.runs}
    looks, marks, rest = styles({label: preset for label, (preset, _) in methods.items()}), [], []
    numbers = sorted({*NUMBERS, *(n for n in study.streams if n > 1)})
    for label, (preset, options) in methods.items():
        counted = [(n, count) for n in numbers if (count := added(preset, options, n, width, sites))]
        if not counted:
            continue
        trained = [point for point in counted if study.measured(label, point[0])]
        x, y = zip(*counted, strict=True)
        marks.append(Mark(label, looks[label], x, y, label, is_faint=not trained))
        if trained:
            x, y = zip(*trained, strict=True)
            marks.append(Mark(label, looks[label], x, y, label, False, True, texts=("trained in this study",) * len(x)))
        # N! leaves every other method at the bottom; where its line leaves the page is clear enough.
        rest += [count for _, count in counted if preset != "mhc-lite"]
    ticks = tuple((float(n), str(n)) for n in numbers)
    limits = (min(rest) / 1.6, 6 * max(rest))
    x, y = Axis("residual streams N", True, ticks), Axis("added parameters", True, limits=limits)
    panel = Panel(f"D = {width}, {sites} sites", x, y, tuple(marks), height=460)
    caption = "Counted, not measured; points mark what this study has trained. mhc-lite grows like N factorial."
    return Chart("parameters", "Added parameters against the number of streams", (panel,), caption)


@dataclass(frozen=True)
class Sweep:
    """Methods that differ in one option only."""

    preset: str
    option: str
    streams: int
    fixed: Mapping[str, Any]
    values: tuple[tuple[Any, str], ...]


def option_sweeps(study: Study) -> list[Sweep]:
    """Every preset with several values of one option at one N, its default among them if that was trained."""
    found = []
    for n in study.streams:
        runs: dict[str, Run] = {run.label: run for run in study.runs if study.measured(run.label, n)}
        families = {(run.preset, name) for run in runs.values() for name in run.options if not run.is_residual}
        for preset, name in sorted(families):
            groups: dict[str, list[Run]] = {}
            for run in runs.values():
                if run.preset == preset:
                    fixed = {key: value for key, value in run.options.items() if key != name}
                    groups.setdefault(repr(sorted(fixed.items())), []).append(run)
            for members in groups.values():
                # Of two labels for the same value, one given and one by default, the first is enough.
                values = {}
                for run in members:
                    value = option(preset, run.options, name, n, study.size[0] if study.size else 768)
                    values.setdefault(repr(value), (value, run.label))
                if len(values) > 1 and any(name in run.options for run in members):
                    fixed = {key: value for key, value in members[0].options.items() if key != name}
                    found.append(Sweep(preset, name, n, fixed, tuple(values.values())))
    return found


def sweep_charts(study: Study, main: Table) -> list[Chart]:
    """A chart for each swept option, and one of bpb against N if some method has several."""
    charts = [_option_chart(study, main, sweep) for sweep in option_sweeps(study)]
    streams = _streams_chart(study, main)
    return [*charts, *([streams] if streams else [])]


def _option_chart(study: Study, main: Table, sweep: Sweep) -> Chart:
    rows = {row["method"]: row for row in main.rows if row["streams"] == sweep.streams}
    numeric = all(
        isinstance(value, int | float) and not isinstance(value, bool) and value > 0 for value, _ in sweep.values
    )
    # Ranks that are tuples have no order of their own; their parameters have.
    order = sorted(sweep.values, key=lambda pair: pair[0] if numeric else (rows[pair[1]]["added"] or 0))
    places = [float(value) if numeric else float(place) for place, (value, _) in enumerate(order)]
    ticks = tuple((x, show_rank(value)) for x, (value, _) in zip(places, order, strict=True))
    axis = Axis(f"{sweep.option} of {sweep.preset}", numeric, ticks)
    found = [(x, rows[label]) for x, (_, label) in zip(places, order, strict=True)]
    looks = styles(study.preset_of)
    style = looks.get(sweep.preset) or looks[order[0][1]]
    panels = [
        _metric_panel(study, main, sweep.streams, metric, axis, {sweep.preset: (found, style)})
        for metric in _metrics(found)
    ]
    counts = [(x, row) for x, row in found if row["added"]]
    if counts:
        mark = Mark(
            sweep.preset, style, tuple(x for x, _ in counts), tuple(row["added"] for _, row in counts), points=True
        )
        panels.append(Panel("added parameters", axis, Axis("added parameters"), (mark,)))
    fixed = "".join(f", {key} = {show_rank(value)}" for key, value in sweep.fixed.items())
    suffix = "".join(f"-{key}{show_rank(value)}" for key, value in sweep.fixed.items())
    return Chart(
        f"sweep-{file_name(f'{sweep.preset}{suffix}-{sweep.option}-n{sweep.streams}')}",
        f"{sweep.preset}: {sweep.option} at N = {sweep.streams}{fixed}",
        tuple(panels),
        "Mean over seeds, one standard deviation.",
    )


def _streams_chart(study: Study, main: Table) -> Chart | None:
    """bpb against N, of methods that were trained with several."""
    looks, lines = styles(study.preset_of), {}
    for label in study.labels:
        rows = [(float(row["streams"]), row) for row in main.rows if row["method"] == label and row["bpb"] is not None]
        if label != study.baseline and len(rows) > 1:
            lines[label] = (rows, looks[label])
    if not lines:
        return None
    numbers = sorted({x for rows, _ in lines.values() for x, _ in rows})
    axis = Axis("residual streams N", True, tuple((x, f"{x:.0f}") for x in numbers))
    metrics = _metrics([row for rows, _ in lines.values() for row in rows])
    panels = [_metric_panel(study, main, None, metric, axis, lines) for metric in metrics]
    caption = "Mean over seeds, one standard deviation. Residual has one stream and is the horizontal line."
    return Chart("sweep-streams", "Against the number of streams", tuple(panels), caption)


Lines = Mapping[str, tuple[Sequence[tuple[float, Row]], Any]]


def _metric_panel(study: Study, main: Table, streams: int | None, metric: str, axis: Axis, lines: Lines) -> Panel:
    marks = []
    for label, (found, style) in lines.items():
        rows = [(x, row) for x, row in found if row[metric] is not None]
        has_bars = all(row[f"{metric}_sd"] is not None for _, row in rows)
        centres = tuple(row[metric] for _, row in rows)
        spreads = [row[f"{metric}_sd"] for _, row in rows] if has_bars else []
        marks.append(
            Mark(
                label,
                style,
                tuple(x for x, _ in rows),
                centres,
                label if streams is None else "",
                points=True,
                y_low=tuple(centre - spread for centre, spread in zip(centres, spreads, strict=has_bars)),
                y_high=tuple(centre + spread for centre, spread in zip(centres, spreads, strict=has_bars)),
                texts=tuple(f"{row['method']}, {row['seeds']} seeds" for _, row in rows),
            )
        )
    base = next((row for row in main.rows if row["method"] == study.baseline and row[metric] is not None), None)
    rules = (Rule(base["method"], styles(study.preset_of)[base["method"]], base[metric]),) if base else ()
    name = {"bpb": "Validation bpb", "core": "CORE"}[metric]
    return Panel(name, axis, Axis(name, digits=4), tuple(marks), rules)


def _metrics(rows: Sequence[tuple[float, Row]]) -> list[str]:
    return [metric for metric in ("bpb", "core") if sum(row[metric] is not None for _, row in rows) > 1]
