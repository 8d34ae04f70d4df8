"""The rows of one rank: row groups are read and tokenized in windows, shuffled and packed."""

from __future__ import annotations

import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from temper_lab.data.corpus import Corpus
from temper_lab.data.packing import Builder, Ints, Key, Packer, Pieces, permutation

# Raised whenever the same corpus, tokenizer, seed and settings would give other batches, of training or validation, so
# that runs from before and after are not mixed. In version 1 the text was read almost in order.
ORDER_VERSION = 2
# Characters to tokenize at a time.
BATCH = 1_000_000
# A window has at least about this many slices, so that its text comes from all over the corpus.
SLICES = 64

# A corpus in memory is tokenized once, however many loaders use it.
_HELD: WeakKeyDictionary[Corpus, dict[tuple[object, ...], Pieces]] = WeakKeyDictionary()


class Slice(NamedTuple):
    """Every `count`-th text of a row group from `first` on: a small row group is one slice, a large one several."""

    group: int
    first: int
    # NamedTuple has a method of this name, which nothing here calls.
    count: int  # type: ignore[assignment]
    num_bytes: int


@dataclass(frozen=True)
class Reader:
    """Reads the pieces of one rank, with an epoch as one window or as several.

    A split that fits in memory is one window of all its pieces, tokenized once. The slices of a larger one are shuffled
    anew each epoch and divided into windows.

    Args:
        rank, world: this shard of the pieces, and the number of disjoint shards.
        max_ids: texts of more ids than this, including the BOS, become several pieces; None leaves them whole.
        in_memory_bytes: a split of at most this many bytes of text is held in memory as ids.
        shuffle_bytes: the bytes of text in one window of a larger split.
    """

    corpus: Corpus
    tokenizer: Any
    split: str
    rank: int = 0
    world: int = 1
    seed: int = 0
    max_ids: int | None = None
    in_memory_bytes: float = 1e9
    shuffle_bytes: float = 128e6

    @cached_property
    def num_bytes(self) -> int:
        """About how many bytes of text the split has, over all ranks."""
        return sum(self.corpus.num_bytes(self.split, group) for group in self.corpus.groups(self.split))

    @property
    def is_in_memory(self) -> bool:
        return self.num_bytes <= self.in_memory_bytes

    @property
    def order(self) -> str:
        """The kind of shuffling in words; positions in data that is shuffled differently are not comparable."""
        return "in memory" if self.is_in_memory else f"in windows of {self.shuffle_bytes / 1e6:g} MB"

    @cached_property
    def _slices(self) -> list[Slice]:
        """The slices that this rank reads. In memory every rank reads all of them, and pieces are divided instead."""
        most = np.inf if self.is_in_memory else min(self.shuffle_bytes, self.num_bytes / self.world) / SLICES
        slices = []
        for group in self.corpus.groups(self.split):
            num_bytes = self.corpus.num_bytes(self.split, group)
            count = max(1, -int(-num_bytes // most))
            slices += [Slice(group, first, count, num_bytes // count) for first in range(count)]
        if self.is_in_memory:
            return slices
        # The division is the same in every epoch, so ranks stay disjoint even when one is an epoch ahead of another.
        order = permutation(len(slices), self.seed, "shares")
        return [slices[index] for index in order[self.rank :: self.world]]

    @cached_property
    def num_windows(self) -> int:
        """The number of windows in an epoch."""
        if self.is_in_memory:
            return 1
        return max(1, -int(-total_bytes(self._slices) // self.shuffle_bytes))

    def window(self, epoch: int, number: int) -> list[Slice]:
        """The slices of one window."""
        if self.is_in_memory:
            return self._slices
        found, done, total = [], 0, max(total_bytes(self._slices), 1)
        for index in permutation(len(self._slices), self.seed, epoch, "windows"):
            entry = self._slices[index]
            # Slices are assigned by their middle, so that windows are about equally large; integers avoid rounding.
            if (2 * done + entry.num_bytes) * self.num_windows // (2 * total) == number:
                found.append(entry)
            done += entry.num_bytes
        return found

    def read(self, slices: list[Slice], builder: Builder) -> Iterator[int]:
        """Adds the pieces of some slices to a builder; yields the number of bytes read since the last time."""
        by_group: dict[int, list[Slice]] = defaultdict(list)
        for entry in slices:
            by_group[entry.group].append(entry)
        # Each row group is opened once, however many of its slices are read, and its texts are held a batch at a time.
        for group, members in by_group.items():
            firsts, count = {entry.first for entry in members}, members[0].count
            texts = (
                (group, index, document, text)
                for index, (document, text) in enumerate(self.corpus.documents(self.split, group))
                if index % count in firsts
            )
            left = total_bytes(members)
            for batch in _batched(texts):
                self._encode(batch, builder)
                # The sizes of slices are estimates, and what is yielded adds up to them.
                num_bytes = min(sum(len(text.encode()) for *_, text in batch), left)
                left -= num_bytes
                yield num_bytes
            yield left

    def _encode(self, texts: list[tuple[int, int, int, str]], builder: Builder) -> None:
        for (group, index, document, _), ids in zip(
            texts, self.tokenizer.encode_batch([text for *_, text in texts]), strict=True
        ):
            builder.add(group, index, document, ids)

    def builder(self) -> Builder:
        return Builder(self.tokenizer.bos, self.max_ids)

    @property
    def _name(self) -> tuple[object, ...]:
        return self.tokenizer, self.split, self.max_ids

    @property
    def held(self) -> Pieces | None:
        """All pieces of the split, if they are already in memory."""
        return _HELD.get(self.corpus, {}).get(self._name)

    def hold(self, pieces: Pieces) -> None:
        """Keeps all pieces of the split in memory as long as the corpus is in use."""
        _HELD.setdefault(self.corpus, {})[self._name] = pieces

    def share(self, pieces: Pieces) -> Ints:
        """The indices of a window's pieces that belong to this rank."""
        if not self.is_in_memory:
            return np.arange(len(pieces))
        return permutation(len(pieces), self.seed, "shares")[self.rank :: self.world]

    def recall(self, keys: list[Key]) -> Pieces:
        """The pieces that keys refer to, in the order of the keys, read and tokenized again if necessary."""
        pieces = self.held
        if pieces is None:
            wanted: dict[int, set[int]] = defaultdict(set)
            for group, index, _ in keys:
                wanted[group].add(index)
            builder = self.builder()
            for group, indices in wanted.items():
                texts = enumerate(self.corpus.documents(self.split, group))
                found = ((group, index, document, text) for index, (document, text) in texts if index in indices)
                for batch in _batched(found):
                    self._encode(batch, builder)
            pieces = builder.build()
        places = pieces.find(keys)
        if missing := [key for key in keys if tuple(key) not in places]:
            raise ValueError(f"{self.corpus.name}: no piece {missing[0]} any more; the corpus has changed")
        return pieces.take(np.array([places[tuple(key)] for key in keys], dtype=np.int64))


def total_bytes(slices: list[Slice]) -> int:
    return sum(entry.num_bytes for entry in slices)


def _batched(texts: Iterable[tuple[int, int, int, str]]) -> Iterator[list[tuple[int, int, int, str]]]:
    """Texts in batches of about BATCH characters."""
    batch, num_chars = [], 0
    for entry in texts:
        batch.append(entry)
        num_chars += len(entry[-1])
        if num_chars >= BATCH:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


@dataclass(frozen=True)
class Place:
    """A position in a stream, sufficient for resuming.

    Args:
        window: the window within the epoch.
        row: the row within the window.
        carried: the pieces left over by the previous window, with which the packer begins.
    """

    epoch: int = 0
    window: int = 0
    row: int = 0
    carried: list[Key] = field(default_factory=list)


class Window:
    """The rows of one window.

    Args:
        pieces: the pieces of the window.
        share: the indices of those that belong to this rank.
        carried: the pieces left over by the previous window.
        length: ids per row.
        seed: the seed of both shuffles, of pieces and of rows.
        drain: pack the last pieces too, as long as they fill rows; otherwise they are carried to the next window.

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
        # Carried pieces are numbered after all others.
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
        # Sorted by arrival, in which the carried pieces come first.
        left = np.array(packer.left(), dtype=np.int64)
        self.left = carried.take(left[left >= len(pieces)] - len(pieces)).join(pieces.take(left[left < len(pieces)]))

    def __len__(self) -> int:
        return len(self._starts) - 1

    def members(self, row: int) -> list[tuple[Pieces, int]]:
        """The pieces of a row, each with the collection that holds it."""
        at = self._rows[row]
        num = len(self._pieces)
        indices = self._members[self._starts[at] : self._starts[at + 1]].tolist()
        return [(self._pieces, index) if index < num else (self._carried, index - num) for index in indices]

    def ids(self, row: int) -> NDArray[Any]:
        """The ids of a row; the excess of its last piece is dropped."""
        return np.concatenate([pieces[index] for pieces, index in self.members(row)])[: self._length]


class Stream:
    """The rows of one rank from a position on, epoch after epoch.

    Args:
        length: ids per row.
    """

    def __init__(self, reader: Reader, length: int, place: Place | None = None) -> None:
        self._reader, self._length = reader, length
        self._place = place or Place()
        self._window: Window | None = None
        # The number of empty windows in succession.
        self._num_empty = 0

    @property
    def place(self) -> Place:
        """The position after the last row that was taken."""
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
            tell: called with the bytes of text tokenized so far, and the total.
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
        # Whole documents stay in the buffer from one window to the next, as in the public recipe. Pieces that were cut
        # to fit are packed completely, so that the ends of documents come no later than the rest.
        drain = reader.max_ids is not None or place.window + 1 == reader.num_windows
        self._window = Window(pieces, share, carried, self._length, seed, drain=drain)
        self._num_empty = 0 if len(share) else self._num_empty + 1
        if self._num_empty > reader.num_windows:
            raise ValueError(
                f"{reader.corpus.name}: no {reader.split} documents for rank {reader.rank} of {reader.world}; "
                "use fewer processes or a larger corpus"
            )
        # A part of the next window is read with every row of this one.
        self._next = Reading(reader, self._after(carried))
        self._pace = total_bytes(self._next.slices) / max(len(self._window) - place.row, 1)
        self._ahead = 0.0

    def _opened(self) -> Window:
        assert self._window is not None
        return self._window

    def __iter__(self) -> Iterator[tuple[Window, int]]:
        return self

    def __next__(self) -> tuple[Window, int]:
        """The next row, as its window and its index in that window."""
        self.prepare()
        window = self._opened()
        while self._place.row >= len(window):
            left = window.left
            self._place = self._after(left)
            # The old window is released before the new one is complete, to save memory.
            del window
            self._window = None
            for _ in self._next:
                pass
            self._open(self._next.pieces, left)
            window = self._opened()
        row = self._place.row
        self._place = replace(self._place, row=row + 1)
        self._ahead -= self._pace
        while self._ahead < 0:
            self._ahead += next(self._next, np.inf)
        return window, row


class Reading:
    """A window that is read step by step; iterating yields the bytes of text read since the last step."""

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
        """All pieces of the window, once it has been read completely."""
        if self._held is not None:
            return self._held
        pieces = self._builder.build()
        if self._reader.is_in_memory:
            self._reader.hold(pieces)
        return pieces
