"""Best-fit packing: documents of many lengths into rows of one length, without padding."""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Iterable, Iterator
from typing import Any

Keyed = tuple[Any, list[int]]
"""A document with the key that names it in the saved state."""


class Packer:
    """An iterator of full rows. Each takes the longest buffered document that fits, again and again; when none fits,
    the shortest is cropped to fill the row, and its rest is dropped.

    Args:
        documents: keys and ids, where the ids begin with a BOS; so every row does too.
        length: ids per row.
        buffer_size: how many documents there are to choose from.
        buffered: the documents an earlier packer had in its buffer, in the order of its `keys()`.
    """

    def __init__(
        self, documents: Iterable[Keyed], length: int, *, buffer_size: int = 1000, buffered: Iterable[Keyed] = ()
    ) -> None:
        if length < 2 or buffer_size < 1:
            raise ValueError(f"length {length}, buffer_size {buffer_size}; expected at least 2 and 1")
        self.length = length
        self.buffer_size = buffer_size
        self._documents = iter(documents)
        self._arrived = 0
        # By arrival, and sorted as (size, -arrival): among equals, the oldest is the last.
        self._buffer: dict[int, Keyed] = {}
        self._sizes: list[tuple[int, int]] = []
        for key, ids in buffered:
            self._add(key, ids)

    def keys(self) -> list[Any]:
        """The keys of the buffered documents in the order of arrival: all there is to save."""
        return [key for key, _ in self._buffer.values()]

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        """The next row; documents that run out before it is full end the iteration."""
        row: list[int] = []
        while (room := self.length - len(row)) > 0:
            self._fill()
            if not self._sizes:
                raise StopIteration
            at = bisect(self._sizes, (room, 1)) - 1
            if at < 0:
                at = bisect(self._sizes, (self._sizes[0][0], 1)) - 1
            _, arrival = self._sizes.pop(at)
            row += self._buffer.pop(-arrival)[1][:room]
        return row

    def _fill(self) -> None:
        # To the brim before every choice: what a row gets depends on the documents alone, not on when they came.
        while len(self._sizes) < self.buffer_size:
            document = next(self._documents, None)
            if document is None:
                return
            self._add(*document)

    def _add(self, key: Any, ids: list[int]) -> None:
        if not ids:
            raise ValueError(f"document {key!r} has no ids; expected a BOS at least")
        self._arrived += 1
        self._buffer[self._arrived] = (key, ids)
        insort(self._sizes, (len(ids), -self._arrived))
