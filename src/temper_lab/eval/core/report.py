"""The results of an evaluation as a table, as CSV and as JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from typing import Any

from temper_lab.eval.core.summary import CORE_TASKS, Average, TaskResult, core, groups

# Where the two sets of baselines in circulation differ.
TELLING = ("commonsense_qa", "agi_eval_lsat_ar", "bigbench_language_identification")

Results = Mapping[str, TaskResult]


def as_dict(results: Results) -> dict[str, Any]:
    """Everything that JSON is to hold; CORE is null unless all of its tasks are there."""
    average = _core(results)
    return {
        "tasks": {
            label: {
                "accuracy": result.accuracy,
                "centered": result.centered,
                "baseline": result.baseline,
                "items": result.items,
                "correct": result.correct,
            }
            for label, result in results.items()
        },
        "core": None if average.missing else average.value,
        "missing": average.missing,
    }


def as_json(results: Results) -> str:
    return json.dumps(as_dict(results), allow_nan=False) + "\n"


def as_csv(results: Results) -> str:
    """A line per task, and one for CORE if it is one."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("task", "accuracy", "centered", "baseline", "items", "seconds"))
    for label, result in results.items():
        numbers = (f"{value:.6f}" for value in (result.accuracy, result.centered, result.baseline))
        writer.writerow((label, *numbers, result.items, f"{result.seconds:.2f}"))
    average = _core(results)
    if not average.missing:
        writer.writerow(("CORE", "", f"{average.value:.6f}", "", "", ""))
    return out.getvalue()


def print_table(results: Results) -> None:
    from rich.table import Table

    from temper_lab.progress import console

    table = Table(box=None)
    table.add_column("task")
    for name in ("accuracy", "centered", "baseline", "items", "seconds"):
        table.add_column(name, justify="right")
    for label, result in results.items():
        numbers = (f"{value:.4f}" for value in (result.accuracy, result.centered, result.baseline))
        table.add_row(label, *numbers, f"{result.items:,}", f"{result.seconds:.1f}")
    console(240).print(table)


def summary_lines(results: Results, *, baselines: str, max_per_task: int | None) -> list[str]:
    """CORE or why there is none, the groups, and what a reader has to know of the numbers."""
    average = _core(results)
    lines = []
    if average.missing:
        lines.append(f"no CORE: {_lacks(average)}")
        if average.value is not None:
            lines.append(f"mean centered accuracy of the other {average.num_tasks}: {average.value:.4f}")
    else:
        lines.append(f"CORE {average.value:.4f}")
    for name, group in groups({label: result.accuracy for label, result in results.items()}).items():
        if group.value is not None:
            partly = f"; {_lacks(group)}" if group.missing else ""
            lines.append(f"{name}: mean accuracy {group.value:.4f} ({group.num_tasks} tasks{partly})")
    if others := [label for label in results if label not in CORE_TASKS]:
        lines.append(f"not tasks of CORE, and not in these means: {', '.join(others)}")
    if max_per_task is not None:
        lines.append(f"at most {max_per_task:,} items of each task: not to be compared with results on all items")
    telling = (f"{label} {100 * results[label].baseline:g}%" for label in TELLING if label in results)
    # Two versions of them are in circulation.
    lines.append("; ".join((f"baselines from {baselines}", ", ".join(telling))).removesuffix("; "))
    return lines


def _core(results: Results) -> Average:
    return core({label: result.centered for label, result in results.items()})


def _lacks(average: Average) -> str:
    total = average.num_tasks + len(average.missing)
    verb = "is" if len(average.missing) == 1 else "are"
    return f"{len(average.missing)} of {total} tasks {verb} missing: {', '.join(average.missing)}"
