"""Best-fit packing: pieces of many lengths into rows of one length, without padding."""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Iterable, Iterator

Sized = tuple[int, int]
"""A piece and the number of its ids."""


class Packer:
    """An iterator of full rows, each a list of pieces. A row takes the longest buffered piece that fits, again and
    again; when none fits, the shortest is cropped to fill the row, and its rest is dropped.

    Args:
        pieces: in the order in which they enter the buffer.
        length: ids per row.
        buffer_size: how many pieces there are to choose from.
        drain: when the pieces run out, pack what is buffered as far as it fills rows; if not, stop there.
    """

    def __init__(self, pieces: Iterable[Sized], length: int, *, buffer_size: int = 1000, drain: bool = True) -> None:
        if length < 2 or buffer_size < 1:
            raise ValueError(f"length {length}, buffer_size {buffer_size}; expected at least 2 and 1")
        self.length = length
        self.buffer_size = buffer_size
        self.drain = drain
        self._pieces = iter(pieces)
        self._arrived = 0
        # By arrival, and sorted as (size, -arrival): among equals, the oldest is the last.
        self._buffer: dict[int, int] = {}
        self._sizes: list[Sized] = []

    def left(self) -> list[int]:
        """The pieces that no row has taken, in the order of arrival."""
        return [self._buffer[arrival] for arrival in sorted(self._buffer)]

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        """The next row; pieces that run out before it is full stay in the buffer."""
        taken: list[Sized] = []
        room = self.length
        while room > 0:
            # To the brim before every choice: what a row gets depends on the pieces alone, not on when they came.
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
