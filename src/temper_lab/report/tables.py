"""The tables of a report."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import temper
from temper_lab.eval.core.summary import CORE_TASKS
from temper_lab.report.stats import Comparison, average, mean, sd
from temper_lab.report.table import DASH, Column, Row, Table, decimal, percent, spread, whole
from temper_lab.report.view import StudyView
from temper_lab.study import vary
from temper_lab.study.results import Run

SCALE = (
    "The paper's models are larger and were trained on other data, so its numbers stand beside ours for their order "
    "only: loss, bpb and CORE of the two are not comparable."
)


def main_table(study: StudyView) -> Table:
    """The paper's table 1 with our numbers beside the paper's."""
    group = ("streams", *study.fields)
    # The settings of the figures come first.
    variants = sorted(study.variants, key=lambda variant: variant.settings != study.settings)
    places = itertools.product(study.streams, variants)
    rows = [_main_row(variant, label, n) for n, variant in places for label in variant.labels_at(n)]
    lowest: dict[tuple[Any, ...], float] = {}
    for row in rows:
        if row["bpb"] is not None:
            key = tuple(row[name] for name in group)
            lowest[key] = min(row["bpb"], lowest.get(key, row["bpb"]))
    columns = [
        Column("method", lambda row: row["method"], "method", is_text=True),
        Column("N", lambda row: str(row["streams"]), "streams"),
        *vary_columns(study.fields),
        Column("seeds", _seeds, "seeds"),
        Column("added parameters", lambda row: whole(row["added"]), "added"),
        Column("of mhc", lambda row: percent(row["of_mhc"]), "of_mhc"),
        Column("train loss", lambda row: spread(row["loss"], row["loss_sd"]), "loss"),
        Column(
            "bpb",
            lambda row: spread(row["bpb"], row["bpb_sd"]),
            "bpb",
            is_strong=lambda row: row["bpb"] is not None and row["bpb"] == lowest[tuple(row[name] for name in group)],
        ),
    ]
    if any(row["core"] is not None for row in rows):
        columns.append(Column("CORE", lambda row: spread(row["core"], row["core_sd"]), "core"))
    columns += [
        Column("paper: added", lambda row: whole(row["paper_added"]), "paper_added"),
        Column("paper: loss", lambda row: decimal(row["paper_loss"], 3), "paper_loss"),
        Column("paper: bpb", lambda row: decimal(row["paper_bpb"], 3), "paper_bpb"),
        Column("paper: CORE", lambda row: decimal(row["paper_core"], 3), "paper_core"),
    ]
    note = (
        f"Mean ± standard deviation over seeds; bold is the lowest mean bpb at that N{_with(study)}, be it by noise. "
        f"Added parameters are trainable routing parameters{_at_size(study)}; of the paper's model, "
        f"D = {paper()['dim']} and {paper()['sites']} sites, also for methods that the paper does not have. {SCALE}"
    )
    if study.baseline is not None and len(study.streams) > 1:
        note += " Residual has one stream whatever N is: the same runs stand at every N, of the seeds that others have."
    return Table("main", f"{study.name}: methods beside the paper's table 1", tuple(rows), tuple(columns), note, group)


def vary_columns(fields: Iterable[str]) -> list[Column]:
    """A column for every varied field."""

    def column(name: str) -> Column:
        return Column(vary.short(name), lambda row: DASH if row[name] is None else vary.show(row[name]), name)

    return [column(name) for name in fields]


def _with(study: StudyView) -> str:
    return " and these settings" if study.fields else ""


def _main_row(study: StudyView, label: str, num_streams: int) -> dict[str, Any]:
    runs, asked = list(study.measured(label, num_streams).values()), study.at(label, num_streams)
    row: dict[str, Any] = {"method": label, "streams": num_streams, **study.here}
    row |= {"seeds": len(runs), "asked": len(asked)}
    row["state"] = "" if runs else "/".join(dict.fromkeys(run.status for run in asked))
    row["added"] = next((run.added for run in asked if run.added is not None), None)
    mhc = next((run.added for run in study.at("mhc", num_streams) if run.added), None)
    row["of_mhc"] = row["added"] / mhc if mhc and row["added"] is not None else None
    for name, values in (
        ("loss", [run.train_loss for run in runs]),
        ("bpb", [run.bpb for run in runs]),
        ("core", [run.core_score for run in runs]),
    ):
        known = [value for value in values if value is not None]
        row[name], row[f"{name}_sd"] = (mean(known) if known else None), sd(known)
    theirs = paper_row(label, num_streams)
    first = asked[0]
    row["paper_added"] = added(first.preset, first.options, num_streams, paper()["dim"], paper()["sites"])
    return row | {f"paper_{name}": theirs.get(name) for name in ("loss", "bpb", "core")}


def _seeds(row: Row) -> str:
    if row["state"]:
        return str(row["state"])
    return str(row["seeds"]) if row["seeds"] == row["asked"] else f"{row['seeds']} of {row['asked']}"


def _at_size(study: StudyView) -> str:
    is_one = not any(name.startswith("model.") for name in study.fields)
    return "" if study.size is None or not is_one else f" (D = {study.size[0]}, {study.size[1]} sites)"


def significance_table(comparisons: Sequence[Comparison]) -> Table:
    rows = []
    for one in comparisons:
        paired = one.paired
        rows.append(
            {
                "against": one.against,
                "streams": one.num_streams,
                "method": one.label,
                **one.settings,
                "pairs": paired.pairs if paired else 0,
                "difference": paired.mean if paired else None,
                "low": paired.low if paired else None,
                "high": paired.high if paired else None,
                "p": paired.p if paired else None,
                "p_holm": one.p_holm,
                "verdict": one.verdict,
            }
        )
    fields = dict.fromkeys(name for one in comparisons for name in one.settings)
    columns = (
        Column("method", lambda row: row["method"], "method", is_text=True),
        Column("N", lambda row: str(row["streams"]), "streams"),
        *vary_columns(fields),
        Column("against", lambda row: row["against"], "against", is_text=True),
        Column("difference in bpb", lambda row: decimal(row["difference"], sign=True), "difference"),
        Column("95% interval", _interval, "low"),
        Column("pairs", lambda row: str(row["pairs"]), "pairs"),
        Column("p", lambda row: decimal(row["p"]), "p"),
        Column("p, corrected", lambda row: decimal(row["p_holm"]), "p_holm"),
        Column(
            "verdict", lambda row: row["verdict"], "verdict", lambda row: row["verdict"] in ("better", "worse"), True
        ),
    )
    note = (
        "Differences of bpb, paired by seed; below 0 is better. Corrected by Holm for all with that baseline at that N"
        f"{' and these settings' if fields else ''}."
    )
    return Table("significance", "Differences over seeds", tuple(rows), columns, note)


def _interval(row: Row) -> str:
    return DASH if row["low"] is None else f"{row['low']:+.4f} .. {row['high']:+.4f}"


def cost_table(study: StudyView) -> Table | None:
    """The table of the interleaved measurement; None if there is none."""
    cost = study.results.cost
    if cost is None or not cost.rows:
        return None
    rows = []
    for entry in cost.rows:
        row: dict[str, Any] = {"method": entry.method, "streams": entry.streams}
        for name, measured in (("step_ms", entry.step_ms), ("ratio", entry.ratio)):
            row |= {f"{name}_{part}": getattr(measured, part) for part in ("median", "low", "high")}
        rows.append(row)
    columns = (
        Column("method", lambda row: row["method"], "method", is_text=True),
        Column("N", lambda row: str(row["streams"]), "streams"),
        Column("step, ms", lambda row: _quartiles(row, "step_ms", 1), "step_ms_median"),
        Column("time, residual = 1", lambda row: _quartiles(row, "ratio", 3), "ratio_median"),
    )
    note = "Median and quartiles of interleaved rounds in one process: forward, backward and optimizer step."
    return Table("cost", "Cost of a training step", tuple(rows), columns, note)


def _quartiles(row: Row, name: str, digits: int) -> str:
    if row[f"{name}_median"] is None:
        return DASH
    low, high = (decimal(row[f"{name}_{part}"], digits) for part in ("low", "high"))
    return f"{row[f'{name}_median']:.{digits}f} ({low} .. {high})"


def runs_table(study: StudyView) -> Table:
    """The table of all runs with their status."""
    rows = [
        {
            "key": run.key,
            **study.values(run.settings, is_residual=run.is_residual),
            "status": run.status,
            "step": run.step,
            "steps": run.steps,
            "bpb": run.bpb,
            "added": run.added,
            "frozen": run.parameters.frozen,
            "total": run.parameters.total,
            "step_seconds": run.timing.step_seconds if run.timing else None,
            "reason": why(run),
        }
        for run in study.runs
    ]
    columns = (
        Column("run", lambda row: row["key"], "key", is_text=True),
        *vary_columns(study.fields),
        Column("status", lambda row: row["status"], "status", lambda row: row["status"] != "finished", True),
        Column("step", lambda row: f"{whole(row['step'])} of {whole(row['steps'])}", "step"),
        Column("bpb", lambda row: decimal(row["bpb"]), "bpb"),
        Column("added parameters", lambda row: whole(row["added"]), "added"),
        Column("all parameters", lambda row: whole(row["total"]), "total"),
        Column("s a step", lambda row: decimal(row["step_seconds"], 3), "step_seconds"),
        Column("reason", lambda row: row["reason"] or DASH, "reason", is_text=True),
    )
    note = "Seconds a step are the median of the run itself, at whatever time and beside whatever else it ran."
    return Table("runs", "Runs", tuple(rows), columns, note)


def why(run: Run) -> str | None:
    """The reason why a run has no number."""
    if run.reason is None and run.is_finished and run.bpb is None:
        return "finished without a finite bpb: it is in no mean and no comparison"
    return run.reason


def curves_table(study: StudyView) -> Table:
    """The bpb curves as data: mean and standard deviation over seeds."""
    rows = []
    for n, variant in itertools.product(study.streams, study.variants):
        for label in variant.labels_at(n):
            series = average([run.val.curve("bpb") for run in variant.measured(label, n).values()])
            if series is not None:
                sds = series.sds or [None] * len(series.steps)
                for step, centre, sd_ in zip(series.steps, series.means, sds, strict=True):
                    row = {"method": label, "streams": n, **variant.here, "seeds": series.seeds, "step": step}
                    rows.append(row | {"bpb": centre, "bpb_sd": sd_})
    return Table("curves", "Validation bpb", tuple(rows))


# The 97.5% quantile of the normal distribution: tasks have tens to thousands of items.
CORE_REACH = 1.96
WITHIN = "within chance"


def core_table(study: StudyView) -> Table | None:
    """Centered accuracy over all tasks and by task, where CORE was evaluated."""
    tasks = sorted({task for run in study.runs for task in run.core_tasks})
    if not tasks:
        return None
    rows = [
        _core_row(label, n, runs, tasks)
        for n in study.streams
        for label in study.labels_at(n)
        if (runs := [run for run in study.measured(label, n).values() if run.core_tasks])
    ]

    def column(task: str) -> Column:
        return Column(task, lambda row: _with_error(row, task), task)

    name = _core_name(len([task for task in tasks if task in CORE_TASKS]))
    columns = [
        Column("method", lambda row: row["method"], "method", is_text=True),
        Column("N", lambda row: str(row["streams"]), "streams"),
        Column(name, lambda row: _with_error(row, "mean"), "mean"),
        Column("95% interval", _core_interval, "low"),
        Column("against guessing", lambda row: row["chance"] or DASH, "chance", is_text=True),
        *map(column, tasks),
    ]
    note = (
        "Centered accuracy, mean over seeds ± standard error: guessing is 0. The error is that of the items, which are "
        "the same for every seed, so more seeds do not reduce it; tasks count as independent. Within chance: the "
        "interval includes 0."
    )
    return Table("core", "CORE by task", tuple(rows), tuple(columns), note)


def core_lines(table: Table | None) -> dict[int, str]:
    """A sentence for each N that says for which methods CORE is no more than guessing."""
    lines = {}
    rows = [row for row in table.rows if row["chance"]] if table is not None else []
    for n in dict.fromkeys(row["streams"] for row in rows):
        here = [row for row in rows if row["streams"] == n]
        verdicts = dict.fromkeys(row["chance"] for row in here)
        parts = [
            f"{verdict}: {', '.join(_core_words(row) for row in here if row['chance'] == verdict)}"
            for verdict in verdicts
        ]
        name = _core_name(max(row["tasks"] for row in here))
        lines[n] = f"{name}, centered accuracy ± standard error: {'; '.join(parts)}."
    return lines


def _core_name(num_tasks: int) -> str:
    """The name of the mean, which is CORE only if all tasks are in it."""
    return "CORE" if num_tasks == len(CORE_TASKS) else f"mean of {num_tasks} task{'s' if num_tasks != 1 else ''}"


def _core_row(label: str, num_streams: int, runs: list[Run], tasks: list[str]) -> dict[str, Any]:
    values, errors = zip(*(_core_of(run) for run in runs), strict=True)
    value, error = _mean_of_all(values), _mean_of_all(errors)
    row: dict[str, Any] = {"method": label, "streams": num_streams, "seeds": len(runs), "mean": value, "mean_se": error}
    row["tasks"] = max(sum(task in CORE_TASKS for task in run.core_tasks) for run in runs)
    row |= {"low": None, "high": None, "chance": None}
    if value is not None and error is not None:
        low, high = value - CORE_REACH * error, value + CORE_REACH * error
        chance = WITHIN if low <= 0 <= high else "above chance" if low > 0 else "below chance"
        row |= {"low": low, "high": high, "chance": chance}
    for task in tasks:
        here = [run for run in runs if task in run.core_tasks]
        row[task] = _mean_of_all([run.core_tasks[task] for run in here])
        row[f"{task}_se"] = _mean_of_all([run.core_errors.get(task) for run in here])
    return row


def _core_of(run: Run) -> tuple[float | None, float | None]:
    """The CORE of a run, or the mean over its available tasks, with the standard error."""
    tasks = [task for task in CORE_TASKS if task in run.core_tasks]
    if not tasks:
        return run.core_score, None
    value = mean([run.core_tasks[task] for task in tasks]) if run.core_score is None else run.core_score
    errors = [run.core_errors[task] for task in tasks if task in run.core_errors]
    if len(errors) < len(tasks):
        return value, None
    return value, math.sqrt(math.fsum(error**2 for error in errors)) / len(tasks)


def _mean_of_all(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if known and len(known) == len(values) else None


def _with_error(row: Row, name: str) -> str:
    error = row[f"{name}_se"]
    return decimal(row[name], 3) + ("" if error is None else f" ± {error:.3f}")


def _core_interval(row: Row) -> str:
    return DASH if row["low"] is None else f"{row['low']:+.3f} .. {row['high']:+.3f}"


def _core_words(row: Row) -> str:
    return f"{row['method']} {row['mean']:.3f} ± {row['mean_se']:.3f}"


@cache
def paper() -> dict[str, Any]:
    """The paper's table 1, with the size of its model."""
    text = (files("temper_lab.report") / "assets" / "paper.json").read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    return content


def paper_row(label: str, num_streams: int) -> dict[str, Any]:
    """The paper's numbers of a method at N; empty if it has none."""
    row: dict[str, Any] = paper()["table"].get(str(num_streams), {}).get(label, {})
    return row


def added(preset: str, options: Mapping[str, Any], num_streams: int, dim: int, sites: int) -> int | None:
    """Trainable routing parameters of a model, or None for options that do not fit this size."""
    try:
        return sites * temper.count_parameters(temper.preset(preset, num_streams=num_streams, dim=dim, **options))
    except (ValueError, TypeError):
        return None


def option(preset: str, options: Mapping[str, Any], name: str, num_streams: int, dim: int) -> Any:
    """The value that an option of a method has, given or by default; None if it has none of that name."""
    if name in options:
        return options[name]
    try:
        config = temper.preset(preset, num_streams=num_streams, dim=dim, **options)
    except (ValueError, TypeError):
        return None
    parts = (config.res, config.pre, config.post, config.mixer)
    return next((part.options[name] for part in parts if part is not None and name in part.options), None)
