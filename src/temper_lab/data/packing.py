"""Tokenized pieces of text, stored compactly; their order; and best-fit packing into rows without padding."""

from __future__ import annotations

import array
import hashlib
from bisect import bisect, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Key = list[int]
"""The row group of a piece, its text in that group, and its number in that text, by which it is read again."""

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Pieces:
    """Pieces of documents, each a BOS and the ids of one stretch of text.

    Args:
        ids: the ids of all pieces, concatenated; uint16 if they fit.
        starts: where each piece begins in `ids`, and where the last one ends.
        keys: (num_pieces, 3), see `Key`.
        documents: the document number of each piece.
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
        """A selection of the pieces, in the order given."""
        ids = np.concatenate([self.ids[:0], *(self[index] for index in chosen)])
        return Pieces(ids, _starts(self.sizes[chosen]), self.keys[chosen], self.documents[chosen])

    def join(self, other: Pieces) -> Pieces:
        """These pieces, followed by the others."""
        pairs = ((self.ids, other.ids), (self.sizes, other.sizes), (self.keys, other.keys))
        ids, sizes, keys = (np.concatenate(pair) for pair in pairs)
        return Pieces(ids, _starts(sizes), keys, np.concatenate((self.documents, other.documents)))

    def find(self, keys: list[Key]) -> dict[tuple[int, ...], int]:
        """The index of every piece that one of the keys names."""
        wanted = np.array(keys, dtype=np.int64).reshape(-1, 3)
        # Candidates are found by array operations first, without a Python object for every piece.
        likely = np.flatnonzero(np.isin(self.keys[:, 0], wanted[:, 0]) & np.isin(self.keys[:, 1], wanted[:, 1]))
        return dict(zip(map(tuple, self.keys[likely].tolist()), likely.tolist(), strict=True))


class Builder:
    """Collects pieces as texts are tokenized.

    Args:
        bos: the id that every piece begins with.
        max_ids: texts of more ids than this, including the BOS, become several pieces; None leaves them whole.
    """

    def __init__(self, bos: int, max_ids: int | None) -> None:
        self._bos, self._max_ids = bos, max_ids
        # Arrays grow in place: joining a list of chunks would need twice the memory.
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
        """The pieces added so far; the builder must not be used afterwards."""
        starts = _starts(_view(self._sizes))
        return Pieces(_view(self._ids), starts, _view(self._keys).reshape(-1, 3), _view(self._documents))


def _starts(sizes: Ints) -> Ints:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)])


def _view(values: array.array[int]) -> NDArray[Any]:
    return np.frombuffer(values, dtype=values.typecode) if values else np.empty(0, dtype=values.typecode)


def permutation(num: int, *seed: object) -> Ints:
    """A permutation of `range(num)` that is the same on every machine and with every library version."""
    digest = hashlib.blake2b("/".join(map(str, seed)).encode(), digest_size=8).digest()
    # SplitMix64: numbers are sorted by their hash.
    step, first, second = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
    mixed = np.arange(1, num + 1, dtype=np.uint64) * np.uint64(step) + np.uint64(int.from_bytes(digest))
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(first)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(second)
    return np.argsort(mixed ^ (mixed >> np.uint64(31)), kind="stable")


Sized = tuple[int, int]
"""A piece, and the number of its ids."""


class Packer:
    """An iterator of full rows, each a list of pieces.

    A row takes the longest buffered piece that fits, again and again; when none fits, the shortest is cropped to fill
    the row, and the rest of it is dropped.

    Args:
        pieces: the pieces, in the order in which they enter the buffer.
        length: ids per row.
        buffer_size: the number of pieces to choose from.
        drain: when the pieces run out, go on packing the buffer as long as it fills rows; otherwise stop there.
    """

    def __init__(self, pieces: Iterable[Sized], length: int, *, buffer_size: int = 1000, drain: bool = True) -> None:
        if length < 2 or buffer_size < 1:
            raise ValueError(f"length {length}, buffer_size {buffer_size}; expected at least 2 and 1")
        self.length = length
        self.buffer_size = buffer_size
        self.drain = drain
        self._pieces = iter(pieces)
        self._arrived = 0
        # One index by arrival, one sorted by (size, -arrival): among pieces of equal size, the oldest is last.
        self._buffer: dict[int, int] = {}
        self._sizes: list[Sized] = []

    def left(self) -> list[int]:
        """The pieces that are in no row, in the order of arrival."""
        return [self._buffer[arrival] for arrival in sorted(self._buffer)]

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        """The next row. Pieces that run out before it is full stay in the buffer."""
        taken: list[Sized] = []
        room = self.length
        while room > 0:
            # The buffer is filled before every choice, so that rows depend on the pieces alone, not on when they
            # arrived.
            is_full = self._fill()
            if not self._sizes or not (is_full or self.drain):
                for item in taken:
                    insort(self._sizes, item)
                raise StopIteration
            at = bisect(self._sizes, (room, 1)) - 1
            if at < 0:
                at = bisect(self._sizes, (self._sizes[0][0], 1)) - 1
            taken.append(self._sizes.pop(at))
            room -= taken[-1][0]
        return [self._buffer.pop(-arrival) for _, arrival in taken]

    def _fill(self) -> bool:
        while len(self._sizes) < self.buffer_size:
            entry = next(self._pieces, None)
            if entry is None:
                return False
            piece, size = entry
            if size < 1:
                raise ValueError(f"piece {piece} has no ids; expected a BOS at least")
            self._arrived += 1
            self._buffer[self._arrived] = piece
            insort(self._sizes, (size, -self._arrived))
        return True
