"""Tokenized text in little memory: the pieces that rows are packed from, and their order."""

from __future__ import annotations

import array
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Key = list[int]
"""What a piece is read again by: its row group, its text in that group, its number in that text."""

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Pieces:
    """Pieces of documents, each a BOS and the ids of one stretch of text.

    Args:
        ids: of all pieces, one after the other; uint16 if they fit.
        starts: where each piece begins in `ids`, and where the last one ends.
        keys: (num_pieces, 3), see `Key`.
        documents: a number for each piece that is the same for pieces of one document.
    """

    ids: NDArray[Any]
    starts: Ints
    keys: NDArray[np.int32]
    documents: Ints

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def sizes(self) -> Ints:
        """The number of ids of each piece."""
        return np.diff(self.starts)

    def __getitem__(self, index: int) -> NDArray[Any]:
        """The ids of one piece."""
        return self.ids[self.starts[index] : self.starts[index + 1]]

    def take(self, chosen: Ints) -> Pieces:
        """Some of the pieces, in the order given."""
        ids = np.concatenate([self.ids[:0], *(self[index] for index in chosen)])
        return Pieces(ids, _starts(self.sizes[chosen]), self.keys[chosen], self.documents[chosen])

    def join(self, other: Pieces) -> Pieces:
        """These pieces, and after them the others."""
        pairs = ((self.ids, other.ids), (self.sizes, other.sizes), (self.keys, other.keys))
        ids, sizes, keys = (np.concatenate(pair) for pair in pairs)
        return Pieces(ids, _starts(sizes), keys, np.concatenate((self.documents, other.documents)))

    def find(self, keys: list[Key]) -> dict[tuple[int, ...], int]:
        """The index of every piece that one of the keys names."""
        wanted = np.array(keys, dtype=np.int64).reshape(-1, 3)
        # All that may be among them, without a Python object for every piece there is.
        likely = np.flatnonzero(np.isin(self.keys[:, 0], wanted[:, 0]) & np.isin(self.keys[:, 1], wanted[:, 1]))
        return dict(zip(map(tuple, self.keys[likely].tolist()), likely.tolist(), strict=True))


class Builder:
    """Collects pieces as texts are tokenized.

    Args:
        bos: the id that every piece begins with.
        max_ids: texts of more ids than this, with the BOS, become several pieces; None leaves them whole.
    """

    def __init__(self, bos: int, max_ids: int | None) -> None:
        self._bos, self._max_ids = bos, max_ids
        # Arrays grow in place: a list of chunks would need twice the memory when it is joined.
        self._ids = array.array("H")
        self._sizes, self._keys, self._documents = array.array("q"), array.array("i"), array.array("q")

    def add(self, group: int, text: int, document: int, ids: Sequence[int]) -> None:
        """Adds the pieces of one text."""
        if not ids:
            return
        step = len(ids) if self._max_ids is None else self._max_ids - 1
        firsts = range(0, len(ids), step)
        self._append(np.insert(np.asarray(ids, dtype=np.uint32), firsts, self._bos))
        for number, first in enumerate(firsts):
            self._sizes.append(min(step, len(ids) - first) + 1)
            self._keys.extend((group, text, number))
            self._documents.append(document)

    def _append(self, ids: NDArray[np.uint32]) -> None:
        if self._ids.typecode == "H" and ids.max() >= 1 << 16:
            self._ids = array.array("I", self._ids)
        self._ids.frombytes(ids.astype(self._ids.typecode).tobytes())

    def build(self) -> Pieces:
        """What was added so far; the builder must not be used any more."""
        starts = _starts(_view(self._sizes))
        return Pieces(_view(self._ids), starts, _view(self._keys).reshape(-1, 3), _view(self._documents))


def _starts(sizes: Ints) -> Ints:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)])


def _view(values: array.array[int]) -> NDArray[Any]:
    return np.frombuffer(values, dtype=values.typecode) if values else np.empty(0, dtype=values.typecode)


def permutation(num: int, *seed: object) -> Ints:
    """A permutation of `range(num)` that is the same on every machine and with every version of every library."""
    digest = hashlib.blake2b("/".join(map(str, seed)).encode(), digest_size=8).digest()
    # SplitMix64: every number's place is decided by a hash of it.
    step, first, second = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
    mixed = np.arange(1, num + 1, dtype=np.uint64) * np.uint64(step) + np.uint64(int.from_bytes(digest))
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(first)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(second)
    return np.argsort(mixed ^ (mixed >> np.uint64(31)), kind="stable")
