"""The figures of a study as data, which matplotlib and plotly draw."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from temper_lab.report.palette import PLAIN, Style, styles
from temper_lab.report.stats import Comparison, Series, average, frontier, gap, gap_reference, half_window, smooth, thin
from temper_lab.report.table import Table
from temper_lab.report.view import StudyView
from temper_lab.study.results import Curve, Run

Numbers = tuple[float, ...]


@dataclass(frozen=True)
class Axis:
    """
    Args:
        ticks: values with their names; empty lets the drawer choose.
        is_log: base 2 if `ticks` are given, else 10.
        digits: the decimal places of displayed values; None for integers with thousands separators.
        limits: the ends of the axis; None fits them to the data.
    """

    label: str = ""
    is_log: bool = False
    ticks: tuple[tuple[float, str], ...] = ()
    digits: int | None = None
    limits: tuple[float, float] | None = None


@dataclass(frozen=True)
class Mark:
    """A line, points, or both, of one method.

    Args:
        method: its entry in the legend; empty if it is always shown.
        low, high: a band around y.
        x_low, x_high, y_low, y_high: error bars, as values.
        texts: one for each point, shown with its values.
        is_faint: drawn as background.
        is_ring: an open circle around points that stand out.
    """

    name: str
    style: Style
    x: Numbers
    y: Numbers
    method: str = ""
    line: bool = True
    points: bool = False
    low: Numbers = ()
    high: Numbers = ()
    x_low: Numbers = ()
    x_high: Numbers = ()
    y_low: Numbers = ()
    y_high: Numbers = ()
    texts: tuple[str, ...] = ()
    is_faint: bool = False
    is_ring: bool = False


@dataclass(frozen=True)
class Rule:
    """A straight line across the panel, such as a baseline."""

    name: str
    style: Style
    value: float
    is_vertical: bool = False
    method: str = ""


@dataclass(frozen=True)
class Panel:
    """
    Args:
        height: in pixels of the page.
    """

    title: str
    x: Axis
    y: Axis
    marks: tuple[Mark, ...] = ()
    rules: tuple[Rule, ...] = ()
    height: int = 380

    @property
    def is_rows(self) -> bool:
        """True if each method has a row of its own."""
        return bool(self.y.ticks) and not self.y.is_log


@dataclass(frozen=True)
class Chart:
    """A figure of one or several panels.

    Args:
        name: the name of its files.
        caption: the text below it.
    """

    name: str
    title: str
    panels: tuple[Panel, ...]
    caption: str = ""


def file_name(text: str) -> str:
    """A text as part of a file name: labels come from a file, and must not lead to another folder."""
    return "".join(character if character.isalnum() or character in "-." else "_" for character in text)


def log_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Ticks of a logarithmic axis: 10k, 20k, 50k, or only powers of ten over a wide range."""
    digits = (1, 2, 5) if high / low < 200 else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [
        (value, _short(value)) for power in powers for digit in digits if low <= (value := digit * 10.0**power) <= high
    ]


def _short(value: float) -> str:
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{suffix}"
    return f"{value:g}"


STEP = Axis("step")
# Charts of the runs with one setting; sweeps show the others.
ONE_SETTING = ("curves", "gaps", "loss", "mixing-", "pareto-", "parameters", "forest-")
# For each name in results.json: the title of its panel, the axis, and the smallest span of the axis.
MIXING = {
    "res_off_diagonal": ("Off-diagonal mass of res", "sum over a row", 0.0),
    "composite_gain": ("Composite gain, forward", "largest row sum", 0.05),
    "composite_backward_gain": ("Composite gain, backward", "largest column sum", 0.05),
    "stream_similarity": ("Stream similarity", "mean cosine of two streams", 0.05),
}


def curves(study: StudyView) -> Chart | None:
    """Validation bpb against the step."""
    chart = _over_steps(study, "curves", "Validation bits per byte", "bpb", lambda run: run.val.curve("bpb"))
    return chart and _with_caption(chart, "Mean over seeds; the band is one standard deviation to each side.")


def losses(study: StudyView) -> Chart | None:
    """Training loss against the step, smoothed."""
    window = 2 * max((half_window(len(run.train.step)) for run in study.runs), default=0) + 1
    chart = _over_steps(study, "loss", "Training loss", "loss, nats", lambda run: thin(smooth(run.train.curve("loss"))))
    caption = (
        f"Moving average over {window} steps, narrowing towards both ends; mean over seeds, one standard deviation."
    )
    return chart and _with_caption(chart, caption)


def gaps(study: StudyView) -> Chart | None:
    """Smoothed differences in bpb from one method."""
    looks, panels, notes = styles(study.preset_of), [], []
    for n in study.streams:
        found = gap_reference(study, n)
        if found is None:
            continue
        reference, reason = found
        runs, marks = study.measured(reference, n), []
        for label in study.labels_at(n):
            series = gap(study.measured(label, n), runs) if label != reference else None
            if series is not None:
                marks.append(_line(label, looks[label], series))
        if marks:
            rule = Rule(reference, looks[reference], 0.0, method=reference)
            axis = Axis(f"bpb minus bpb of {reference}", digits=4)
            panels.append(Panel(f"N = {n}, gaps to {reference}", STEP, axis, tuple(marks), (rule,)))
            notes.append(f"N = {n}: gaps to {reference}, {reason}.")
    if not panels:
        return None
    window = 2 * max(half_window(len(run.val.step)) for run in study.runs) + 1
    smoothed = f"Smoothed over {window} validations, narrowing towards both ends. " if window > 1 else ""
    caption = f"{' '.join(notes)} Paired by seed; above 0 is worse. {smoothed}"
    return Chart("gaps", "Gaps in validation bpb", tuple(panels), caption.strip())


def mixing(study: StudyView) -> list[Chart]:
    """Charts for each N of mixing and of stream similarity against the step."""
    charts = []
    for n in study.streams:
        panels = [_mixing_panel(study, n, name) for name in MIXING]
        if any(panel.marks for panel in panels):
            caption = (
                "Measured at every validation on the same few tokens (256, or one row if that is longer); mean over "
                "seeds, the band reaches from the lowest seed to the highest. Off-diagonal mass: how much a stream "
                "takes from the others, mean over sites; exactly 0, and so not on a logarithmic axis, where res is "
                "the identity. Composite gain: of the product of res over all sites; forward, of signals, it is 1 "
                "where rows sum to 1, and backward, of gradients, 1 where columns do; more where mixing amplifies. "
                "Stream similarity: mean over sites; 1 where all streams are copies."
            )
            shown = tuple(panel for panel in panels if panel.marks)
            charts.append(Chart(f"mixing-n{n}", f"Mixing during training, N = {n}", shown, caption))
    return charts


def _mixing_panel(study: StudyView, num_streams: int, name: str) -> Panel:
    title, label, least = MIXING[name]
    looks, marks, is_log = styles(study.preset_of), [], name == "res_off_diagonal"
    for method in study.labels_at(num_streams):
        curves = [run.mixing(name) for run in study.measured(method, num_streams).values()]
        # Zero has no logarithm.
        curves = [tuple(point for point in curve if point[1] > 0 or not is_log) for curve in curves]
        series = average(curves)
        if series is not None:
            at = [[dict(curve)[step] for curve in curves] for step in series.steps]
            low, high = (tuple(map(end, at)) if len(curves) > 1 else () for end in (min, max))
            marks.append(replace(_line(method, looks[method], series), low=low, high=high))
    values = [value for mark in marks for value in (*mark.y, *mark.low, *mark.high)]
    limits = None
    if values and max(values) - min(values) < least:
        middle = (max(values) + min(values)) / 2
        limits = (middle - least / 2, middle + least / 2)
    # A method that diverges must not squeeze all others to the bottom.
    is_log = is_log or bool(values and min(values) > 0 and max(values) / min(values) > 20)
    return Panel(title, STEP, Axis(label, is_log, digits=5, limits=limits), tuple(marks))


def pareto(study: StudyView, main: Table, metric: str = "bpb") -> Chart | None:
    """bpb or CORE against added parameters, with the frontier."""
    looks, panels = styles(study.preset_of), []
    # For CORE, higher is better.
    sign = 1 if metric == "bpb" else -1
    for n in study.streams:
        rows = [
            row
            for row in main.rows
            if row["streams"] == n and study.holds(row) and row[metric] is not None and row["added"] is not None
        ]
        points = [(row["added"], row[metric]) for row in rows if row["added"] > 0]
        if not points:
            continue
        edge = [(x, sign * y) for x, y in frontier([(x, sign * y) for x, y in points])]
        marks = [Mark("frontier", PLAIN, *_columns(edge), is_faint=True)] if len(edge) > 1 else []
        rules = []
        for row in rows:
            look, label = looks[row["method"]], row["method"]
            if row["added"] == 0:
                rules.append(Rule(label, look, row[metric], method=label))
                continue
            spread = row[f"{metric}_sd"]
            y_low, y_high = ((), ()) if spread is None else ((row[metric] - spread,), (row[metric] + spread,))
            text = f"{row['seeds']} seed{'s' if row['seeds'] != 1 else ''}"
            marks.append(
                Mark(
                    label,
                    look,
                    (row["added"],),
                    (row[metric],),
                    label,
                    line=False,
                    points=True,
                    y_low=y_low,
                    y_high=y_high,
                    texts=(text,),
                )
            )
        axis = Axis("added parameters", is_log=True)
        panels.append(Panel(f"N = {n}", axis, Axis(_named(metric), digits=4), tuple(marks), tuple(rules)))
    if not panels:
        return None
    better = "lower" if sign == 1 else "higher"
    caption = (
        f"Left and {better} is better; the dotted line joins the methods that no other beats in both. "
        "Residual adds nothing and is the horizontal line. Bars: one standard deviation over seeds, which move all "
        "methods alike: differences, paired by seed, are under Significance."
    )
    return Chart(f"pareto-{metric}", f"{_named(metric)} against added parameters", tuple(panels), caption)


def cost(study: StudyView, table: Table | None) -> Chart | None:
    """The time of a training step, as multiples of residual."""
    if table is None:
        return None
    looks, panels = styles(study.preset_of), []
    numbers = [row["streams"] for row in table.rows if row["ratio_median"] is not None and row["method"] in looks]
    # Residual is the line at 1 in every panel.
    for n in sorted({n for n in numbers if n > 1} or set(numbers)):
        rows = [row for row in table.rows if row["streams"] == n and row["ratio_median"] is not None]
        rows = [row for row in rows if row["method"] in looks]
        marks = tuple(
            Mark(
                row["method"],
                looks[row["method"]],
                (row["ratio_median"],),
                (float(-place),),
                row["method"],
                line=False,
                points=True,
                x_low=(row["ratio_low"] if row["ratio_low"] is not None else row["ratio_median"],),
                x_high=(row["ratio_high"] if row["ratio_high"] is not None else row["ratio_median"],),
            )
            for place, row in enumerate(rows)
        )
        ticks = tuple((float(-place), row["method"]) for place, row in enumerate(rows))
        rule = Rule("residual", looks.get(study.baseline or "", PLAIN), 1.0, is_vertical=True)
        axis = Axis("time of a training step, residual = 1", digits=3)
        panels.append(Panel(f"N = {n}", axis, Axis(ticks=ticks), marks, (rule,), _height(len(rows))))
    caption = "Median of interleaved rounds; bars are the quartiles."
    return Chart("cost", "Cost of a training step", tuple(panels), caption) if panels else None


def forest(study: StudyView, comparisons: Sequence[Comparison]) -> Chart | None:
    """Differences from a baseline with their intervals."""
    rows = [one for one in comparisons if one.paired is not None]
    if not rows:
        return None
    looks, panels, against = styles(study.preset_of), [], rows[0].against
    for n in dict.fromkeys(one.num_streams for one in rows):
        here, marks, ticks = [one for one in rows if one.num_streams == n], [], []
        for place, one in enumerate(here):
            look, y = looks[one.label], float(-place)
            ticks.append((y, one.label))
            seeds = tuple(one.differences.values())
            if len(seeds) > 1:
                texts = tuple(f"seed {seed}" for seed in one.differences)
                marks.append(
                    Mark(
                        one.label,
                        look,
                        seeds,
                        (y - 0.25,) * len(seeds),
                        one.label,
                        False,
                        True,
                        texts=texts,
                        is_faint=True,
                    )
                )
            assert one.paired is not None
            low, high = one.paired.low, one.paired.high
            bars: dict[str, Any] = {} if low is None else {"x_low": (low,), "x_high": (high,)}
            text = f"{one.verdict}, {one.paired.pairs} pair{'s' if one.paired.pairs != 1 else ''}"
            marks.append(Mark(one.label, look, (one.paired.mean,), (y,), one.label, False, True, texts=(text,), **bars))
        rule = Rule(against, looks[against], 0.0, is_vertical=True)
        x = Axis(f"bpb minus bpb of {against}", digits=4)
        panels.append(
            Panel(f"N = {n}, against {against}", x, Axis(ticks=tuple(ticks)), tuple(marks), (rule,), _height(len(here)))
        )
    caption = (
        "Mean paired difference with its 95% interval, not corrected; faint: each seed. Left of the line is better."
    )
    return Chart(f"forest-{file_name(against)}", f"Differences to {against}", tuple(panels), caption)


def _over_steps(study: StudyView, name: str, title: str, label: str, curve: Callable[[Run], Curve]) -> Chart | None:
    looks, panels = styles(study.preset_of), []
    for n in study.streams:
        marks = []
        for method in study.labels_at(n):
            series = average([curve(run) for run in study.measured(method, n).values()])
            if series is not None:
                marks.append(_line(method, looks[method], series))
        if marks:
            panels.append(Panel(f"N = {n}", STEP, Axis(label, digits=4), tuple(marks)))
    return Chart(name, title, tuple(panels)) if panels else None


def _line(label: str, look: Style, series: Series) -> Mark:
    text = f"{series.seeds} seed{'s' if series.seeds != 1 else ''}"
    return Mark(
        label,
        look,
        series.steps,
        series.means,
        label,
        points=len(series.steps) <= 30,
        low=series.low,
        high=series.high,
        texts=(text,) * len(series.steps),
    )


def at_settings(chart: Chart, study: StudyView) -> Chart:
    """The chart with its runs' settings in the title, if the study varies fields and the chart shows one setting."""
    return replace(chart, title=chart.title + study.suffix) if chart.name.startswith(ONE_SETTING) else chart


def _with_caption(chart: Chart, caption: str) -> Chart:
    return replace(chart, caption=caption)


def _columns(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    return tuple(x for x, _ in points), tuple(y for _, y in points)


def _named(metric: str) -> str:
    return {"bpb": "Validation bpb", "core": "CORE"}[metric]


def _height(rows: int) -> int:
    return 130 + 30 * rows
