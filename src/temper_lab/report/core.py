"""CORE with its standard errors, and where it is no more than chance."""

from __future__ import annotations

import math
from typing import Any

from temper_lab.eval.core.summary import CORE_TASKS
from temper_lab.report.formats import DASH, Column, Row, Table, decimal
from temper_lab.report.results import Run, Study
from temper_lab.report.statistics import mean

# Of a normal distribution: tasks have tens to thousands of items.
REACH = 1.96
WITHIN = "within chance"


def core_table(study: Study) -> Table | None:
    """Centered accuracy over all tasks and by task, where CORE was evaluated."""
    tasks = sorted({task for run in study.runs for task in run.core_tasks})
    if not tasks:
        return None
    rows = [
        _row(label, n, runs, tasks)
        for n in study.streams
        for label in study.labels_at(n)
        if (runs := [run for run in study.measured(label, n).values() if run.core_tasks])
    ]
    name = _name(len([task for task in tasks if task in CORE_TASKS]))
    columns = [
        Column("method", lambda row: row["method"], "method", is_text=True),
        Column("N", lambda row: str(row["streams"]), "streams"),
        Column(name, lambda row: _with_error(row, "mean"), "mean"),
        Column("95% interval", _interval, "low"),
        Column("against guessing", lambda row: row["chance"] or DASH, "chance", is_text=True),
        *(Column(task, lambda row, task=task: _with_error(row, task), task) for task in tasks),
    ]
    note = (
        "Centered accuracy, mean over seeds ± standard error: guessing is 0. The error is that of the items, which are "
        "the same for every seed, so more seeds do not reduce it; tasks count as independent. Within chance: the "
        "interval includes 0."
    )
    return Table("core", "CORE by task", tuple(rows), tuple(columns), note)


def core_lines(table: Table | None) -> dict[int, str]:
    """By N, a sentence that says for which methods CORE is no more than guessing."""
    lines = {}
    rows = [row for row in table.rows if row["chance"]] if table is not None else []
    for n in dict.fromkeys(row["streams"] for row in rows):
        here = [row for row in rows if row["streams"] == n]
        verdicts = dict.fromkeys(row["chance"] for row in here)
        parts = [
            f"{verdict}: {', '.join(_said(row) for row in here if row['chance'] == verdict)}" for verdict in verdicts
        ]
        name = _name(max(row["tasks"] for row in here))
        lines[n] = f"{name}, centered accuracy ± standard error: {'; '.join(parts)}."
    return lines


def _name(num_tasks: int) -> str:
    """CORE is the mean of all its tasks, and of nothing less."""
    return "CORE" if num_tasks == len(CORE_TASKS) else f"mean of {num_tasks} task{'s' if num_tasks != 1 else ''}"


def _row(label: str, streams: int, runs: list[Run], tasks: list[str]) -> dict[str, Any]:
    values, errors = zip(*(_overall(run) for run in runs), strict=True)
    value, error = _mean(values), _mean(errors)
    row: dict[str, Any] = {"method": label, "streams": streams, "seeds": len(runs), "mean": value, "mean_se": error}
    row["tasks"] = max(sum(task in CORE_TASKS for task in run.core_tasks) for run in runs)
    row |= {"low": None, "high": None, "chance": None}
    if value is not None and error is not None:
        low, high = value - REACH * error, value + REACH * error
        chance = WITHIN if low <= 0 <= high else "above chance" if low > 0 else "below chance"
        row |= {"low": low, "high": high, "chance": chance}
    for task in tasks:
        here = [run for run in runs if task in run.core_tasks]
        row[task] = _mean([run.core_tasks[task] for run in here])
        row[f"{task}_se"] = _mean([run.core_errors.get(task) for run in here])
    return row


def _overall(run: Run) -> tuple[float | None, float | None]:
    """CORE of a run, or the mean over the tasks of it that there are; and its standard error."""
    tasks = [task for task in CORE_TASKS if task in run.core_tasks]
    if not tasks:
        return run.core, None
    value = mean([run.core_tasks[task] for task in tasks]) if run.core is None else run.core
    errors = [run.core_errors[task] for task in tasks if task in run.core_errors]
    if len(errors) < len(tasks):
        return value, None
    return value, math.sqrt(math.fsum(error**2 for error in errors)) / len(tasks)


def _mean(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if known and len(known) == len(values) else None


def _with_error(row: Row, name: str) -> str:
    error = row[f"{name}_se"]
    return decimal(row[name], 3) + ("" if error is None else f" ± {error:.3f}")


def _interval(row: Row) -> str:
    return DASH if row["low"] is None else f"{row['low']:+.3f} .. {row['high']:+.3f}"


def _said(row: Row) -> str:
    return f"{row['method']} {row['mean']:.3f} ± {row['mean_se']:.3f}"
