"""An evaluation: every task, portion by portion, over all processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext

from temper_lab.distributed import World
from temper_lab.eval.core.bundle import Task
from temper_lab.eval.core.kinds import Row, shots_of
from temper_lab.eval.core.partial import Answers, Partial
from temper_lab.eval.core.score import Autocast, score
from temper_lab.eval.core.summary import TaskResult
from temper_lab.eval.models import LanguageModel

# Items of a process between two exchanges, after which an interruption loses nothing that was computed before.
PORTION = 128


def evaluate_task(
    model: LanguageModel,
    task: Task,
    *,
    world: World | None = None,
    partial: Partial | None = None,
    autocast: Autocast = nullcontext,
    progress: Callable[[int], object] = lambda done: None,
) -> TaskResult:
    """The answers of a model to all items of a task, on every process.

    Args:
        partial: where the first process finds and leaves answers.
        progress: called with the number of items done.
    """
    world = world or World()
    partial = partial or Partial(None, "")
    fingerprint = task.fingerprint
    correct, seconds = world.first(lambda: partial.read(fingerprint, len(task.items)))
    started = time.monotonic() - seconds
    progress(sum(answer is not None for answer in correct))
    for portion in _portions(task, correct, PORTION * world.size):
        # Neighbours are of one length, so that all processes get the same work.
        mine = portion[world.rank :: world.size]
        answers = answers_to(model, task, mine, autocast=autocast)
        for part in world.gather(dict(zip(mine, answers, strict=True))):
            for index, is_correct in part.items():
                correct[index] = is_correct
        progress(sum(answer is not None for answer in correct))
        if world.is_first:
            partial.write(fingerprint, correct, time.monotonic() - started)
    return TaskResult([bool(answer) for answer in correct], task.baseline, time.monotonic() - started)


def answers_to(model: LanguageModel, task: Task, indices: list[int], *, autocast: Autocast = nullcontext) -> list[bool]:
    """Whether a model answers these items correctly."""
    scores = score(model, rows_of(model, task, indices), autocast=autocast)
    return [task.kind.is_correct(task.items[index], found) for index, found in zip(indices, scores, strict=True)]


def rows_of(model: LanguageModel, task: Task, indices: list[int]) -> list[list[Row]]:
    """What is to be scored for each of these items, within the limit of the model."""
    prompts = [prompts_of(task, index) for index in indices]
    encoded = iter(model.encode([text for texts in prompts for text in texts]))
    rows = []
    for index, texts in zip(indices, prompts, strict=True):
        try:
            found = task.kind.rows([next(encoded) for _ in texts])
        except ValueError as error:
            raise ValueError(f"{task.label}, item {index}: {error}") from error
        rows.append([row.crop(model.limit) for row in found])
    return rows


def prompts_of(task: Task, index: int) -> list[str]:
    """The texts that ask an item."""
    shots = shots_of(task.items, index, task.num_shots)
    return task.kind.prompts(task.items[index], shots, task.delimiter)


def _portions(task: Task, correct: Answers, size: int) -> Iterator[list[int]]:
    """The items that have no answer yet, longest prompts first: if memory does not suffice, it shows at once."""
    open_items = [index for index, is_correct in enumerate(correct) if is_correct is None]
    open_items.sort(key=lambda index: -sum(map(len, prompts_of(task, index))))
    for start in range(0, len(open_items), size):
        yield open_items[start : start + size]
