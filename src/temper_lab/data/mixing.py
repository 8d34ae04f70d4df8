"""How mixed batches are: the documents in a batch, beside what independent draws would give."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from temper_lab.data.stream import Stream


@dataclass(frozen=True)
class Mixing:
    """Means over some batches.

    Args:
        documents: distinct documents in a batch.
        independent: as many as there would be if every piece of a batch were drawn from the whole split on its own.
    """

    num_batches: int
    documents: float
    independent: float


def measure(stream: Stream, rows: int, num_batches: int, pieces_per_document: Iterable[float]) -> Mixing:
    """Counts documents in the first batches of a stream, at most an epoch of them.

    Args:
        rows: rows per batch.
        pieces_per_document: of the whole split, in any order.
    """
    found, pieces = [], []
    while len(found) < num_batches and stream.place.epoch == 0:
        members = [member for window, row in islice(stream, rows) for member in window.members(row)]
        found.append(len({int(group.documents[index]) for group, index in members}))
        pieces.append(len(members))
    weights = np.fromiter(pieces_per_document, dtype=np.float64)
    independent = [expected_distinct(weights, num) for num in pieces]
    return Mixing(len(found), float(np.mean(found)), float(np.mean(independent)))


def expected_distinct(weights: NDArray[np.float64], num_draws: int) -> float:
    """How many distinct documents to expect in independent draws with probabilities in proportion to weights."""
    # Few weights occur often, however many documents there are.
    values, counts = np.unique(weights, return_counts=True)
    return float((counts * (1 - (1 - values / weights.sum()) ** num_draws)).sum())
