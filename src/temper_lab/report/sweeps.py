"""Figures of parameters against N, and of studies that vary a field of the recipe, an option of a method, or N."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import temper
from temper_lab.method import show_rank
from temper_lab.report.charts import Axis, Chart, Mark, Numbers, Panel, Rule, file_name
from temper_lab.report.palette import Style, styles, styles_of
from temper_lab.report.stats import Paired, mean
from temper_lab.report.tables import added, option
from temper_lab.report.view import StudyView, words
from temper_lab.study import vary
from temper_lab.study.results import Run

NUMBERS = (2, 4, 8, 16)
# Fields that change the validation text that bpb is measured on.
VALIDATION = ("model.context", "train.device_batch_size", "train.val_batches")
METRICS = {"bpb": "Validation bpb", "core": "CORE"}
# Values that span at least this factor have a logarithmic axis.
DECADE = 10

# Numbers by seed.
Runs = Mapping[int, Run]


def parameters(study: StudyView) -> Chart | None:
    """The chart of parameters against N at the study's size, for every preset, with the trained ones marked."""
    if study.size is None:
        return None
    width, sites = study.size
    methods: dict[str, tuple[str, Mapping[str, Any]]] = {name: (name, {}) for name in temper.PRESETS}
    methods |= {run.method: (run.preset, run.options) for run in study.runs}
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
        # mhc-lite's N! would squeeze every other method to the bottom, so its line leaves the figure.
        rest += [count for _, count in counted if preset != "mhc-lite"]
    panel = Panel(f"D = {width}, {sites} sites", *_counted(numbers, rest, "added parameters"), tuple(marks), height=460)
    caption = "Counted, not measured; points mark what this study has trained. mhc-lite grows like N factorial."
    return Chart("parameters", "Added parameters against the number of streams", (panel,), caption)


def parameters_per_site(counts: Mapping[str, Mapping[int, int]], dim: int) -> Chart:
    """The paper's parameter-efficiency figure: parameters of one hyper-connection against N, by method."""
    known = {name: {n: count for n, count in rows.items() if count} for name, rows in counts.items()}
    known = {name: rows for name, rows in known.items() if rows}
    looks = styles_of(known)
    # The legend is in the order in which lines end on the right, from the top.
    order = sorted(known, key=lambda name: -known[name][max(known[name])])
    marks = []
    for name in order:
        numbers = sorted(known[name])
        values = tuple(float(known[name][n]) for n in numbers)
        marks.append(Mark(name, looks[name], tuple(map(float, numbers)), values, name, points=True))
    numbers = sorted({n for rows in known.values() for n in rows})
    rest = [count for name, rows in known.items() if not name.startswith("mhc-lite") for count in rows.values()]
    axes = _counted(numbers, rest, "trainable parameters per hyper-connection")
    title = f"Routing parameters against the number of streams (D = {dim})"
    return Chart("parameters", title, (Panel("", *axes, tuple(marks), height=450),))


def _counted(numbers: Sequence[int], counts: Sequence[int], label: str) -> tuple[Axis, Axis]:
    """Logarithmic axes for parameters against N.

    Args:
        counts: the numbers that must be visible; with N! among them, every other method would be at the bottom.
    """
    ticks = tuple((float(n), str(n)) for n in numbers)
    limits = (min(counts) / 1.6, 6 * max(counts)) if counts else None
    return Axis("residual streams N", True, ticks), Axis(label, True, limits=limits)


@dataclass(frozen=True)
class Line:
    """A method with its runs at every position of an axis, restricted to common seeds if there are any."""

    label: str
    style: Style
    points: tuple[tuple[float, Runs], ...]
    legend: str = ""

    def means(self, metric: str) -> tuple[Numbers, Numbers]:
        known = [(x, found) for x, runs in self.points if (found := numbers(runs, metric))]
        return tuple(x for x, _ in known), tuple(mean(list(found.values())) for _, found in known)


@dataclass(frozen=True)
class Sweep:
    """Methods that were trained with several values of one thing and are equal in everything else.

    Args:
        title: the fixed settings in words.
        values: the value at every position of the axis.
        baseline: the residual runs at every position, drawn as a rule unless they are one of the lines.
        seeds: the seeds that all points have; empty if there are none.
    """

    title: str
    axis: Axis
    values: Mapping[float, Any]
    lines: tuple[Line, ...]
    baseline: Line | None
    seeds: tuple[int, ...]

    @classmethod
    def of(cls, title: str, axis: Axis, values: Mapping[float, Any], lines: Sequence[Line], base: Line | None) -> Sweep:
        """Makes a sweep from runs of common seeds, because seeds differ by more than methods do."""
        everything = [*lines, *([base] if base else [])]
        seeds = set.intersection(*(set(runs) for line in everything for _, runs in line.points))

        def cut(line: Line) -> Line:
            kept = ((x, {seed: run for seed, run in runs.items() if seed in seeds}) for x, runs in line.points)
            return Line(line.label, line.style, tuple(kept), line.legend) if seeds else line

        return cls(title, axis, values, tuple(map(cut, lines)), base and cut(base), tuple(sorted(seeds)))

    @property
    def is_baseline_swept(self) -> bool:
        return self.baseline is not None and any(line.label == self.baseline.label for line in self.lines)


def sweep_charts(study: StudyView) -> list[Chart]:
    """Two charts for each varied field, one for each swept option, and two of N if some method has several."""
    charts: list[Chart] = []
    for name, n in itertools.product(study.fields, study.streams):
        found = field_sweeps(study, name, n)
        file = f"sweep-{file_name(f'{name}-n{n}')}"
        note = " Different values read different amounts of validation text." if name in VALIDATION else ""
        charts += _charts(file, f"{name} at N = {n}", found, note)
    for n in study.streams:
        charts += [_option_chart(study, one) for one in option_sweeps(study, n)]
    return [*charts, *_streams_charts(study)]


def field_sweeps(study: StudyView, name: str, num_streams: int) -> list[Sweep]:
    """A field at one N: a sweep for every combination of the other varied fields in which something has two values."""
    looks, found = styles(study.preset_of), []
    others = [field for field in study.fields if field != name]
    groups: dict[tuple[Any, ...], list[StudyView]] = {}
    for variant in study.variants:
        if variant.here[name] is not None:
            groups.setdefault(tuple(variant.here[field] for field in others), []).append(variant)
    for fixed, variants in groups.items():
        places = _places([variant.here[name] for variant in variants])
        axis = _axis(name, places)
        lines = []
        for label in study.labels:
            runs = [(places[variant.here[name]], variant.measured(label, num_streams)) for variant in variants]
            points = tuple((x, here) for x, here in runs if here)
            if len(points) > 1:
                lines.append(Line(label, looks[label], points, label))
        # A residual network alone does not depend on N.
        if any(line.label != study.baseline for line in lines) or (lines and num_streams == study.streams[0]):
            title = words(dict(zip(others, fixed, strict=True)))
            baseline = next((line for line in lines if line.label == study.baseline), None)
            found.append(Sweep.of(title, axis, {x: value for value, x in places.items()}, lines, baseline))
    return found


def best_values(study: StudyView, num_streams: int) -> list[str]:
    """The value of each varied field with the lowest mean bpb, in sentences."""
    sentences = []
    for name in study.fields:
        for sweep in field_sweeps(study, name, num_streams):
            best: dict[str, list[str]] = {}
            for line in sweep.lines:
                x, y = line.means("bpb")
                if len(set(y)) > 1:
                    best.setdefault(vary.show(sweep.values[x[y.index(min(y))]]), []).append(line.label)
            where = f" with {sweep.title}" if sweep.title else ""
            if best:
                parts = "; ".join(f"{value} for {', '.join(labels)}" for value, labels in best.items())
                sentences.append(f"{name}{where}, lowest mean bpb of the values tried: {parts}.")
    return sentences


def _charts(name: str, title: str, found: Sequence[Sweep], note: str = "") -> list[Chart]:
    """Charts of the numbers against the axis and, where residual was trained too, of the differences from it."""
    panels = [panel for metric in METRICS for sweep in found if (panel := _panel(sweep, metric))]
    charts = [Chart(name, title, tuple(panels), _caption(found, note))] if panels else []
    gaps = [panel for sweep in found if (panel := _gaps(sweep))]
    if gaps:
        what = "bpb minus that of residual with the same settings, paired by seed; below 0 is better."
        caption = f"{what} {_caption(found, has_rings=False)}"
        charts.append(Chart(f"{name}-gap", f"{title}: difference to residual", tuple(gaps), caption))
    return charts


def _caption(found: Sequence[Sweep], note: str = "", *, has_rings: bool = True) -> str:
    texts = dict.fromkeys(
        f"seed{'s' if len(sweep.seeds) > 1 else ''} {', '.join(map(str, sweep.seeds))}, which all points have"
        if sweep.seeds
        else "the seeds of each point, which have none in common"
        for sweep in found
    )
    rings = " Rings: the best mean of a method, be it by noise." if has_rings else ""
    return f"Lines: mean over {'; or over '.join(texts)}. Faint: each seed.{rings}{note}"


@dataclass(frozen=True)
class Options:
    """Methods that differ in one option only."""

    preset: str
    option: str
    num_streams: int
    fixed: Mapping[str, Any]
    values: tuple[tuple[Any, str], ...]


def option_sweeps(study: StudyView, num_streams: int) -> list[Options]:
    """Every preset with several values of one option at one N, its default among them if that was trained."""
    found = []
    runs: dict[str, Run] = {run.method: run for run in study.runs if study.measured(run.method, num_streams)}
    families = {(run.preset, name) for run in runs.values() for name in run.options if not run.is_residual}
    for preset, name in sorted(families):
        groups: dict[str, list[Run]] = {}
        for run in runs.values():
            if run.preset == preset:
                fixed = {key: value for key, value in run.options.items() if key != name}
                groups.setdefault(repr(sorted(fixed.items())), []).append(run)
        for members in groups.values():
            # Of two labels for the same value, one explicit and one by default, only the first is used.
            values: dict[str, tuple[Any, str]] = {}
            for run in members:
                value = option(preset, run.options, name, num_streams, study.size[0] if study.size else 768)
                values.setdefault(repr(value), (value, run.method))
            if len(values) > 1 and any(name in run.options for run in members):
                fixed = {key: value for key, value in members[0].options.items() if key != name}
                found.append(Options(preset, name, num_streams, fixed, tuple(values.values())))
    return found


def _option_chart(study: StudyView, options: Options) -> Chart:
    runs = {label: study.measured(label, options.num_streams) for _, label in options.values}
    counts = {label: next((run.added for run in found.values() if run.added), None) for label, found in runs.items()}
    is_log = all(_is_number(value) and value > 0 for value, _ in options.values)
    # Tuples of ranks are ordered by their parameters.
    order = sorted(options.values, key=lambda pair: pair[0] if is_log else (counts[pair[1]] or 0))
    places = [float(value) if is_log else float(place) for place, (value, _) in enumerate(order)]
    ticks = tuple((x, show_rank(value)) for x, (value, _) in zip(places, order, strict=True))
    axis = Axis(f"{options.option} of {options.preset}", is_log, ticks)
    looks = styles(study.preset_of)
    style = looks.get(options.preset) or looks[order[0][1]]
    labels = [label for _, label in order]
    line = Line(options.preset, style, tuple((x, runs[label]) for x, label in zip(places, labels, strict=True)))
    values = {x: value for x, (value, _) in zip(places, order, strict=True)}
    sweep = Sweep.of("", axis, values, [line], _baseline(study, dict.fromkeys(places, options.num_streams)))
    panels = [panel for metric in METRICS if (panel := _panel(sweep, metric))]
    known = [(x, counts[label]) for x, label in zip(places, labels, strict=True) if counts[label]]
    if known:
        x, y = zip(*known, strict=True)
        mark = Mark(options.preset, style, x, y, points=True)
        panels.append(Panel("added parameters", axis, Axis("added parameters"), (mark,)))
    fixed = "".join(f", {key} = {show_rank(value)}" for key, value in options.fixed.items())
    suffix = "".join(f"-{key}{show_rank(value)}" for key, value in options.fixed.items())
    return Chart(
        f"sweep-{file_name(f'{options.preset}{suffix}-{options.option}-n{options.num_streams}')}",
        f"{options.preset}: {options.option} at N = {options.num_streams}{fixed}{study.suffix}",
        tuple(panels),
        _caption([sweep]),
    )


def _streams_charts(study: StudyView) -> list[Chart]:
    """Charts of bpb against N, for methods that were trained with several."""
    looks, lines = styles(study.preset_of), []
    for label in study.labels:
        points = tuple((float(n), runs) for n in study.streams if (runs := study.measured(label, n)))
        if label != study.baseline and len(points) > 1:
            lines.append(Line(label, looks[label], points, label))
    if not lines:
        return []
    places = {x: int(x) for x in sorted({x for line in lines for x, _ in line.points})}
    axis = Axis("residual streams N", True, tuple((x, str(n)) for x, n in places.items()))
    sweep = Sweep.of("", axis, places, lines, _baseline(study, places))
    note = " Residual has one stream and is the horizontal line." if sweep.baseline else ""
    return _charts("sweep-streams", f"Against the number of streams{study.suffix}", [sweep], note)


def _baseline(study: StudyView, places: Mapping[float, int]) -> Line | None:
    """The residual runs to compare with at each N."""
    if study.baseline is None:
        return None
    points = tuple((x, runs) for x, n in places.items() if (runs := study.measured(study.baseline, n)))
    return Line(study.baseline, styles(study.preset_of)[study.baseline], points) if points else None


def _panel(sweep: Sweep, metric: str) -> Panel | None:
    """A panel of the means, with every seed; None for fewer than two points."""
    marks: list[Mark] = []
    for line in sweep.lines:
        x, y = line.means(metric)
        if not x:
            continue
        found = [numbers(runs, metric) for _, runs in line.points]
        texts = tuple(f"{len(each)} seed{'s' if len(each) != 1 else ''}" for each in found if each)
        marks.append(Mark(line.label, line.style, x, y, line.legend, points=True, texts=texts))
        marks += _each_seed(line, {x: numbers(runs, metric) for x, runs in line.points})
        # For CORE, higher is better. A constant line has no best value.
        best = (min if metric == "bpb" else max)(range(len(y)), key=lambda place: y[place])
        if len(set(y)) > 1:
            name = f"{line.label}, best mean"
            marks.append(Mark(name, line.style, (x[best],), (y[best],), line.legend, False, True, is_ring=True))
    if max((len(mark.x) for mark in marks if mark.line), default=0) < 2:
        return None
    rules: tuple[Rule, ...] = ()
    if sweep.baseline is not None and not sweep.is_baseline_swept:
        level = {seed: value for _, runs in sweep.baseline.points for seed, value in numbers(runs, metric).items()}
        if level:
            rules = (Rule(sweep.baseline.label, sweep.baseline.style, mean(list(level.values()))),)
    title = ", ".join(filter(None, (METRICS[metric], sweep.title)))
    return Panel(title, sweep.axis, Axis(METRICS[metric], digits=4), tuple(marks), rules)


def _gaps(sweep: Sweep) -> Panel | None:
    """A panel of the differences from residual, paired by seed."""
    if sweep.baseline is None:
        return None
    base, marks = {x: numbers(runs, "bpb") for x, runs in sweep.baseline.points}, []
    for line in sweep.lines:
        if line.label == sweep.baseline.label:
            continue
        gaps: dict[float, dict[int, float]] = {}
        for x, runs in line.points:
            mine, theirs = numbers(runs, "bpb"), base.get(x, {})
            if seeds := sorted(mine.keys() & theirs.keys()):
                gaps[x] = {seed: mine[seed] - theirs[seed] for seed in seeds}
        if len(gaps) > 1:
            paired = [Paired.of(list(each.values())) for each in gaps.values()]
            y, texts = tuple(one.mean for one in paired), tuple(map(_interval, paired))
            marks.append(Mark(line.label, line.style, tuple(gaps), y, line.legend, points=True, texts=texts))
            marks += _each_seed(line, gaps)
    if not marks:
        return None
    rule = Rule(sweep.baseline.label, sweep.baseline.style, 0.0)
    return Panel(sweep.title, sweep.axis, Axis(f"bpb minus bpb of {rule.name}", digits=4), tuple(marks), (rule,))


def _each_seed(line: Line, found: Mapping[float, Mapping[int, float]]) -> list[Mark]:
    """Every seed as a faint point, where there are several."""
    if max(map(len, found.values())) < 2:
        return []
    points = [(x, value, f"seed {seed}") for x, each in found.items() for seed, value in each.items()]
    x, y, texts = zip(*points, strict=True)
    return [Mark(line.label, line.style, x, y, line.legend, False, True, texts=texts, is_faint=True)]


def _interval(paired: Paired) -> str:
    pairs = f"{paired.pairs} pair{'s' if paired.pairs != 1 else ''}"
    return pairs if paired.low is None else f"{pairs}, 95% interval {paired.low:+.4f} to {paired.high:+.4f}"


def numbers(runs: Runs, metric: str) -> dict[int, float]:
    """The values of a metric that runs have, by seed."""
    return {
        seed: value
        for seed, run in runs.items()
        if (value := run.bpb if metric == "bpb" else run.core_score) is not None
    }


def _places(values: Iterable[Any]) -> dict[Any, float]:
    """The places of values on an axis: numbers at their value, anything else one after the other."""
    each = vary.ordered(values)
    return {value: float(value) if all(map(_is_number, each)) else float(x) for x, value in enumerate(each)}


def _axis(name: str, places: Mapping[Any, float]) -> Axis:
    numbers = [value for value in places if _is_number(value)]
    is_log = len(numbers) == len(places) and min(numbers) > 0 and max(numbers) / min(numbers) >= DECADE
    return Axis(name, is_log, tuple((x, vary.show(value)) for value, x in places.items()))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
