"""Accuracies, centered accuracies, CORE and groups, computed from the answers, as tables, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# The tasks whose mean is CORE.
CORE_TASKS = (
    "hellaswag_zeroshot",
    "jeopardy",
    "bigbench_qa_wikidata",
    "arc_easy",
    "arc_challenge",
    "copa",
    "commonsense_qa",
    "piqa",
    "openbook_qa",
    "lambada_openai",
    "hellaswag",
    "winograd",
    "winogrande",
    "bigbench_dyck_languages",
    "agi_eval_lsat_ar",
    "bigbench_cs_algorithms",
    "bigbench_operators",
    "bigbench_repeat_copy_logic",
    "squad",
    "coqa",
    "boolq",
    "bigbench_language_identification",
)

# Groups of tasks whose plain accuracies are averaged.
GROUPS = {
    "commonsense": (
        "hellaswag",
        "hellaswag_zeroshot",
        "piqa",
        "arc_easy",
        "arc_challenge",
        "copa",
        "commonsense_qa",
        "openbook_qa",
        "winograd",
        "winogrande",
        "boolq",
    ),
    "language": (
        "lambada_openai",
        "squad",
        "coqa",
        "bigbench_qa_wikidata",
        "bigbench_cs_algorithms",
        "bigbench_operators",
        "bigbench_dyck_languages",
        "agi_eval_lsat_ar",
        "bigbench_language_identification",
    ),
}


@dataclass(frozen=True)
class TaskResult:
    """The result of a task.

    Args:
        correct: whether each item was answered correctly, in the order of evaluation.
        baseline: the accuracy of guessing, from 0 to 1.
    """

    correct: list[bool]
    baseline: float
    seconds: float = 0.0

    @property
    def items(self) -> int:
        return len(self.correct)

    @property
    def accuracy(self) -> float:
        return sum(self.correct) / len(self.correct)

    @property
    def centered(self) -> float:
        return centered(self.accuracy, self.baseline)


@dataclass(frozen=True)
class Average:
    """A mean over the available tasks, and the missing tasks."""

    value: float | None
    num_tasks: int
    missing: list[str]


def centered(accuracy: float, baseline: float) -> float:
    """(accuracy - b) / (1 - b): 0 for guessing, 1 for knowing."""
    return (accuracy - baseline) / (1 - baseline)


def core(values: Mapping[str, float]) -> Average:
    """The mean of centered accuracies by label, which is CORE only if no task is missing."""
    return _average(CORE_TASKS, values)


def groups(accuracies: Mapping[str, float]) -> dict[str, Average]:
    """The averages of the groups from accuracies by label."""
    return {name: _average(labels, accuracies) for name, labels in GROUPS.items()}


def _average(labels: tuple[str, ...], values: Mapping[str, float]) -> Average:
    found = [values[label] for label in labels if label in values]
    missing = [label for label in labels if label not in values]
    return Average(sum(found) / len(found) if found else None, len(found), missing)


# The tasks for which the two published sets of baselines differ.
TELLING = ("commonsense_qa", "agi_eval_lsat_ar", "bigbench_language_identification")

Results = Mapping[str, TaskResult]


def as_dict(results: Results) -> dict[str, Any]:
    """The content of the JSON file; CORE is null unless all of its tasks are there."""
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
    """One line per task, and one for CORE if it is complete."""
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

    from temper_lab.console import console

    table = Table(box=None)
    table.add_column("task")
    for name in ("accuracy", "centered", "baseline", "items", "seconds"):
        table.add_column(name, justify="right")
    for label, result in results.items():
        numbers = (f"{value:.4f}" for value in (result.accuracy, result.centered, result.baseline))
        table.add_row(label, *numbers, f"{result.items:,}", f"{result.seconds:.1f}")
    console(240).print(table)


def summary_lines(results: Results, *, baselines: str, max_per_task: int | None) -> list[str]:
    """Lines with CORE, or the reason why it is missing, the groups, and notes on the numbers."""
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
    # There are two published versions of the baselines.
    lines.append("; ".join((f"baselines from {baselines}", ", ".join(telling))).removesuffix("; "))
    return lines


def _core(results: Results) -> Average:
    return core({label: result.centered for label, result in results.items()})


def _lacks(average: Average) -> str:
    total = average.num_tasks + len(average.missing)
    verb = "is" if len(average.missing) == 1 else "are"
    return f"{len(average.missing)} of {total} tasks {verb} missing: {', '.join(average.missing)}"
