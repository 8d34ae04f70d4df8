"""Rows through a model: the mean loss of every span, and whether the model would have written it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F

from temper_lab.eval.core.batches import Batch, Ids, Unit, batches, leaves, units
from temper_lab.eval.core.kinds import Row, Score
from temper_lab.eval.models import LanguageModel

Autocast = Callable[[], AbstractContextManager[Any]]
# A span without tokens: an answer that all others begin with has nothing of its own, and never wins.
NOTHING = Score(math.inf, False)


def score(
    model: LanguageModel, items: Sequence[Sequence[Row]], *, autocast: Autocast = nullcontext
) -> list[list[Score]]:
    """The scores of the rows of every item, as many items at a time as fit."""
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
    # Padding comes after a prompt, where a causal model has not looked.
    ids_RT = torch.tensor([[*ids[shared:], *[0] * (length + shared - len(ids))] for ids in inputs])
    spans, places, targets = [], [], []
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
