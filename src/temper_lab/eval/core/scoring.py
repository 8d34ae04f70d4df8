"""The evaluation of a task: batches of tokens, their scores, the answers, and resuming after an interruption.

The output of a causal model at a token does not depend on what follows. So a prompt that is a prefix of another needs
no pass of its own, and the common prefix of an item's prompts is read once and cached.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from temper_lab.distributed import World
from temper_lab.eval.core.bundle import Task
from temper_lab.eval.core.summary import TaskResult
from temper_lab.eval.core.tasks import Row, Score, common_prefix, shots_of
from temper_lab.eval.models import LanguageModel
from temper_lab.io import atomic_write, dumps, read_json

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Unit:
    """Prompts with a common prefix, of which `shared` tokens are read once."""

    inputs: list[Ids]
    shared: int = 0

    @property
    def longest(self) -> int:
        return max(map(len, self.inputs))


@dataclass(frozen=True)
class Batch:
    """Units that run together. Their prefixes have one length, so that the cache needs no padding."""

    units: list[Unit]

    @property
    def shared(self) -> int:
        return min(unit.shared for unit in self.units)

    @property
    def num_rows(self) -> int:
        return sum(len(unit.inputs) for unit in self.units)

    @property
    def num_tokens(self) -> int:
        """The number of tokens computed, including padding."""
        tail = max(unit.longest for unit in self.units) - self.shared
        return (len(self.units) if self.shared else 0) * self.shared + self.num_rows * tail

    @property
    def size(self) -> int:
        """The number of tokens in memory; a cached prefix is copied for every row."""
        return self.num_rows * max(unit.longest for unit in self.units)

    def inputs(self) -> Iterator[Ids]:
        for unit in self.units:
            yield from unit.inputs


def leaves(rows: Sequence[Row]) -> list[Ids]:
    """The inputs to compute for some rows: their tokens without the last, and without prefixes of another input."""
    inputs = sorted({row.ids[:-1] for row in rows})
    # When sorted, a prefix comes directly before an input that it is a prefix of.
    return [ids for ids, after in zip(inputs, [*inputs[1:], ()], strict=True) if after[: len(ids)] != ids]


def units(inputs: list[Ids], rows: Sequence[Row], *, can_share: bool, pass_cost: int) -> list[Unit]:
    """The leaves of an item's rows as one unit with a shared prefix, or as several if sharing does not pay off."""
    if can_share and len(inputs) > 1:
        # The token before a span predicts its first token, so it is not in the shared part.
        shared = min(common_prefix(inputs), *(row.start - 1 for row in rows))
        whole = Batch([Unit(inputs, shared)])
        if shared and whole.num_tokens + pass_cost < sum(map(len, inputs)):
            return whole.units
    return [Unit([ids]) for ids in inputs]


def batches(items: Sequence[Unit], *, max_tokens: int, pass_cost: int) -> list[Batch]:
    """Groups units into batches; a unit joins if its padding costs less than a pass of its own."""
    made: list[Batch] = []
    for unit in sorted(items, key=lambda unit: (unit.shared, unit.longest)):
        alone = Batch([unit])
        if made:
            joined = Batch([*made[-1].units, unit])
            saves = joined.num_tokens <= made[-1].num_tokens + alone.num_tokens + pass_cost
            if saves and joined.size <= max_tokens:
                made[-1] = joined
                continue
        made.append(alone)
    return made


Autocast = Callable[[], AbstractContextManager[Any]]
# The span is empty: an answer that is a prefix of all others has no tokens of its own, and never wins.
NOTHING = Score(math.inf, False)


def score(
    model: LanguageModel, items: Sequence[Sequence[Row]], *, autocast: Autocast = nullcontext
) -> list[list[Score]]:
    """The scores of every item's rows, computed for as many items at a time as fit."""
    work: list[Unit] = []
    waiting: dict[Ids, set[Row]] = defaultdict(set)
    for rows in items:
        scored = [row for row in rows if row.start < len(row.ids)]
        if not scored:
            continue
        inputs = leaves(scored)
        work += units(inputs, scored, can_share=model.can_share, pass_cost=model.pass_cost)
        for row in scored:
            waiting[next(ids for ids in inputs if ids[: len(row.ids) - 1] == row.ids[:-1])].add(row)
    found: dict[Row, Score] = {}
    for batch in batches(work, max_tokens=model.max_tokens, pass_cost=model.pass_cost):
        found |= _run(model, batch, waiting, autocast)
    return [[found.get(row, NOTHING) for row in rows] for rows in items]


@torch.inference_mode()
def _run(model: LanguageModel, batch: Batch, waiting: dict[Ids, set[Row]], autocast: Autocast) -> dict[Row, Score]:
    shared, inputs = batch.shared, list(batch.inputs())
    length = max(map(len, inputs)) - shared
    # Padding follows a prompt, where a causal model does not look.
    ids_RT = torch.tensor([[*ids[shared:], *[0] * (length + shared - len(ids))] for ids in inputs])
    spans: list[Row] = []
    places: list[tuple[int, int]] = []
    targets: list[int] = []
    for number, ids in enumerate(inputs):
        for row in sorted(waiting[ids]):
            spans.append(row)
            places += [(number, column - 1 - shared) for column in range(row.start, len(row.ids))]
            targets += row.ids[row.start :]
    rows, columns = torch.tensor(places).T
    with autocast():
        memory = None
        if shared:
            prefixes = torch.tensor([unit.inputs[0][:shared] for unit in batch.units])
            memory = model.remember(prefixes, [len(unit.inputs) for unit in batch.units], length)
        parts, rest = [], torch.tensor(targets)
        for logits_nV in model.logits(ids_RT, rows, columns, memory):
            wanted_n, rest = rest[: len(logits_nV)].to(logits_nV.device), rest[len(logits_nV) :]
            loss_n = F.cross_entropy(logits_nV.float(), wanted_n, reduction="none")
            parts.append((loss_n.cpu(), (logits_nV.argmax(dim=-1) == wanted_n).cpu()))
    loss_n, is_top_n = (torch.cat(part) for part in zip(*parts, strict=True))
    sizes = [len(row.ids) - row.start for row in spans]
    # Sums of float32 numbers are exact in double precision: spans of any lengths can tie.
    means = [part.mean().item() for part in loss_n.double().split(sizes)]
    matches = [part.all().item() for part in is_top_n.split(sizes)]
    return {row: Score(mean, match) for row, mean, match in zip(spans, means, matches, strict=True)}


FORMAT = "temper-core-1"
Answers = list[bool | None]
"""Whether the answer to each item was correct, None where it was not asked yet."""


class Partial:
    """The answers of one model so far, in a file beside the results; another model starts again.

    Args:
        out: the file of the results; None stores nothing.
        model: the model's fingerprint.
    """

    def __init__(self, out: Path | None, model: str) -> None:
        self.path = None if out is None else out.with_name(f".{out.name}.partial")
        self._content: dict[str, Any] = {"format": FORMAT, "model": model, "tasks": {}}
        if self.path is None:
            return
        try:
            found = read_json(self.path)
        except ValueError:
            return
        if (found.get("format"), found.get("model")) == (FORMAT, model) and isinstance(found.get("tasks"), dict):
            self._content = found

    def read(self, task: str, num_items: int) -> tuple[Answers, float]:
        """The answers so far for a task's fingerprint, and the seconds they took."""
        found = self._content["tasks"].get(task)
        match found:
            case {"correct": list(correct), "seconds": int() | float() as seconds}:
                if len(correct) == num_items and all(answer in (True, False, None) for answer in correct):
                    return list(correct), seconds
        return [None] * num_items, 0.0

    def write(self, task: str, correct: Answers, seconds: float) -> None:
        self._content["tasks"][task] = {"correct": correct, "seconds": seconds}
        if self.path is not None:
            atomic_write(self.path, dumps(self.path.name, self._content))

    def forget(self) -> None:
        """Removes the file, once the results are written."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


# The items that a process answers between two exchanges, which is the most an interruption loses.
CHUNK_ITEMS = 128


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
        partial: where rank 0 reads and stores answers.
        progress: called with the number of items done.
    """
    world = world or World()
    partial = partial or Partial(None, "")
    fingerprint = task.fingerprint
    correct, seconds = world.on_rank0(lambda: partial.read(fingerprint, len(task.items)))
    started = time.monotonic() - seconds
    progress(sum(answer is not None for answer in correct))
    for chunk in _chunks(task, correct, CHUNK_ITEMS * world.size):
        # Neighbours have similar lengths, so that all processes get the same work.
        mine = chunk[world.rank :: world.size]
        answers = answers_to(model, task, mine, autocast=autocast)
        for part in world.gather(dict(zip(mine, answers, strict=True))):
            for index, is_correct in part.items():
                correct[index] = is_correct
        progress(sum(answer is not None for answer in correct))
        if world.is_rank0:
            partial.write(fingerprint, correct, time.monotonic() - started)
    return TaskResult([bool(answer) for answer in correct], task.baseline, time.monotonic() - started)


def answers_to(model: LanguageModel, task: Task, indices: list[int], *, autocast: Autocast = nullcontext) -> list[bool]:
    """Tells of every item whether a model answers it correctly."""
    scores = score(model, rows_of(model, task, indices), autocast=autocast)
    return [task.kind.is_correct(task.items[index], found) for index, found in zip(indices, scores, strict=True)]


def rows_of(model: LanguageModel, task: Task, indices: list[int]) -> list[list[Row]]:
    """The requests to score for each item, cut to the model's context."""
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


def _chunks(task: Task, correct: Answers, size: int) -> Iterator[list[int]]:
    """The items without an answer, longest prompts first, so that a lack of memory shows at once."""
    open_items = [index for index, is_correct in enumerate(correct) if is_correct is None]
    open_items.sort(key=lambda index: -sum(map(len, prompts_of(task, index))))
    for start in range(0, len(open_items), size):
        yield open_items[start : start + size]
