"""From correct answers to accuracies, centered accuracies, CORE and the averages of groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# The tasks that CORE is the mean of, all of them.
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

# Plain accuracies are averaged in these.
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
    """How a task went.

    Args:
        correct: for every item, in the order of evaluation.
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
    """A mean over the tasks that are there, and those that are not."""

    value: float | None
    num_tasks: int
    missing: list[str]


def centered(accuracy: float, baseline: float) -> float:
    """(accuracy - b) / (1 - b): 0 for guessing, 1 for knowing."""
    return (accuracy - baseline) / (1 - baseline)


def core(values: Mapping[str, float]) -> Average:
    """CORE from centered accuracies by label; it is CORE only if nothing is missing."""
    return _average(CORE_TASKS, values)


def groups(accuracies: Mapping[str, float]) -> dict[str, Average]:
    """The averages of the groups from accuracies by label."""
    return {name: _average(labels, accuracies) for name, labels in GROUPS.items()}


def _average(labels: tuple[str, ...], values: Mapping[str, float]) -> Average:
    found = [values[label] for label in labels if label in values]
    missing = [label for label in labels if label not in values]
    return Average(sum(found) / len(found) if found else None, len(found), missing)
