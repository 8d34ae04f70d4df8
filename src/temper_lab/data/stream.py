"""Rows without end: windows of shuffled pieces, packed, and their rows shuffled again."""

from __future__ import annotations

import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from temper_lab.data.packing import Packer
from temper_lab.data.pieces import Ints, Key, Pieces, permutation
from temper_lab.data.reader import Reader, total_bytes


@dataclass(frozen=True)
class Place:
    """A place in a stream, all that resuming needs.

    Args:
        window: of the epoch.
        row: of the window.
        carried: the pieces that the window before left over, which the packer begins with.
    """

    epoch: int = 0
    window: int = 0
    row: int = 0
    carried: list[Key] = field(default_factory=list)


class Window:
    """The rows of one window.

    Args:
        pieces: of the window.
        share: which of them belong to this rank.
        carried: the pieces that the window before left over.
        length: ids per row.
        seed: of the two shuffles, of pieces and of rows.
        drain: pack the last pieces too, as far as they fill rows; if not, they are carried to the next window.

    Attributes:
        left: the pieces that are in no row.
    """

    def __init__(
        self, pieces: Pieces, share: Ints, carried: Pieces, length: int, seed: tuple[object, ...], *, drain: bool
    ) -> None:
        self._pieces, self._carried, self._length = pieces, carried, length
        order = share[permutation(len(share), *seed, "pieces")]
        sizes = pieces.sizes[order]
        # A piece that fills a row on its own needs no packing.
        alone = order[sizes == length]
        # The carried pieces are numbered after all the others.
        waiting = zip(range(len(pieces), len(pieces) + len(carried)), carried.sizes.tolist(), strict=True)
        others = zip(order[sizes != length].tolist(), sizes[sizes != length].tolist(), strict=True)
        packer = Packer(chain(waiting, others), length, drain=drain)
        members, ends = array.array("q"), array.array("q")
        for row in packer:
            members.extend(row)
            ends.append(len(members))
        self._members = np.concatenate([alone, np.array(members, dtype=np.int64)])
        self._starts = np.concatenate([np.arange(len(alone) + 1), np.array(ends, dtype=np.int64) + len(alone)])
        self._rows = permutation(len(self), *seed, "rows")
        # In the order of arrival, in which the carried ones are first.
        left = np.array(packer.left(), dtype=np.int64)
        self.left = carried.take(left[left >= len(pieces)] - len(pieces)).join(pieces.take(left[left < len(pieces)]))

    def __len__(self) -> int:
        return len(self._starts) - 1

    def members(self, row: int) -> list[tuple[Pieces, int]]:
        """The pieces of a row, each with the collection that it is in."""
        at = self._rows[row]
        num = len(self._pieces)
        indices = self._members[self._starts[at] : self._starts[at + 1]].tolist()
        return [(self._pieces, index) if index < num else (self._carried, index - num) for index in indices]

    def ids(self, row: int) -> NDArray[Any]:
        """The ids of a row; what does not fit of its last piece is dropped."""
        return np.concatenate([pieces[index] for pieces, index in self.members(row)])[: self._length]


class Stream:
    """The rows of one rank from a place on, epoch after epoch.

    Args:
        length: ids per row.
    """

    def __init__(self, reader: Reader, length: int, place: Place | None = None) -> None:
        self._reader, self._length = reader, length
        self._place = place or Place()
        self._window: Window | None = None
        # How often in succession there was nothing to read.
        self._num_empty = 0

    @property
    def place(self) -> Place:
        """The place after the last row that was taken."""
        if self._window is None or self._place.row < len(self._window):
            return self._place
        return self._after(self._window.left)

    def _after(self, left: Pieces) -> Place:
        """The start of the next window."""
        epoch, number = self._place.epoch, self._place.window + 1
        if number == self._reader.num_windows:
            epoch, number = epoch + 1, 0
        return Place(epoch, number, 0, left.keys.tolist())

    def prepare(self, tell: Callable[[float, float], object] = lambda done, total: None) -> None:
        """Reads what the next row needs.

        Args:
            tell: called with the bytes of text that are tokenized, and those in total.
        """
        if self._window is None:
            reading = Reading(self._reader, self._place)
            total, done = total_bytes(reading.slices), 0.0
            for num_bytes in reading:
                done += num_bytes
                tell(done, total)
            self._open(reading.pieces, self._reader.recall(self._place.carried))

    def _open(self, pieces: Pieces, carried: Pieces) -> None:
        place, reader = self._place, self._reader
        share = reader.share(pieces)
        seed = (reader.seed, place.epoch, place.window, reader.rank)
        # Whole documents stay in the buffer from one window to the next, as the public recipe has it; pieces cut to fit
        # are packed completely, so that the ends of documents come no later than the rest.
        drain = reader.max_ids is not None or place.window + 1 == reader.num_windows
        self._window = Window(pieces, share, carried, self._length, seed, drain=drain)
        self._num_empty = 0 if len(share) else self._num_empty + 1
        if self._num_empty > reader.num_windows:
            raise ValueError(
                f"{reader.corpus.name}: no {reader.split} documents for rank {reader.rank} of {reader.world}; "
                "use fewer processes or a larger corpus"
            )
        # The next window is read a little with every row of this one.
        self._next = Reading(reader, self._after(carried))
        self._pace = total_bytes(self._next.slices) / max(len(self._window) - place.row, 1)
        self._ahead = 0.0

    def __iter__(self) -> Iterator[tuple[Window, int]]:
        return self

    def __next__(self) -> tuple[Window, int]:
        """The next row, as its window and its number there."""
        self.prepare()
        assert self._window is not None
        while self._place.row >= len(self._window):
            left = self._window.left
            self._place = self._after(left)
            # Let go of the old window before the new one is complete.
            self._window = None
            for _ in self._next:
                pass
            self._open(self._next.pieces, left)
        window, row = self._window, self._place.row
        self._place = replace(self._place, row=row + 1)
        self._ahead -= self._pace
        while self._ahead < 0:
            self._ahead += next(self._next, np.inf)
        return window, row


class Reading:
    """The reading of one window, which yields as it goes on: the bytes of text read since the last time."""

    def __init__(self, reader: Reader, place: Place) -> None:
        self._reader = reader
        self._held = reader.held if reader.is_in_memory else None
        self._builder = reader.builder()
        self.slices = reader.window(place.epoch, place.window)
        self._bytes = iter(()) if self._held is not None else reader.read(self.slices, self._builder)

    def __iter__(self) -> Iterator[float]:
        return self

    def __next__(self) -> float:
        return next(self._bytes)

    @property
    def pieces(self) -> Pieces:
        """All that was read, once it is complete."""
        if self._held is not None:
            return self._held
        pieces = self._builder.build()
        if self._reader.is_in_memory:
            self._reader.hold(pieces)
        return pieces
