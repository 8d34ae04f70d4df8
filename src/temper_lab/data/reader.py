"""The pieces of one rank: which row groups are read together, and the tokenizing of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from temper_lab.data.corpus import Corpus
from temper_lab.data.pieces import Builder, Ints, Key, Pieces, permutation

# Characters that are tokenized at a time.
BATCH = 1_000_000
# A window is made of at least about this many slices, so that it has text from everywhere.
SLICES = 64

# A corpus in memory is tokenized once, however many loaders share it.
_HELD: WeakKeyDictionary[Corpus, dict[tuple[object, ...], Pieces]] = WeakKeyDictionary()


class Slice(NamedTuple):
    """Every `count`-th text of a row group from `first` on: a small row group is one slice, a large one several."""

    group: int
    first: int
    count: int
    num_bytes: int


@dataclass(frozen=True)
class Reader:
    """Reads what belongs to one rank, an epoch as one window or as several.

    A split that fits in memory is one window: all its pieces, tokenized once. A larger one is dealt, in another random
    order each epoch, into windows of slices from anywhere in it.

    Args:
        rank, world: which of how many disjoint shares of the pieces.
        max_ids: texts of more ids than this, with the BOS, become several pieces; None leaves them whole.
        in_memory_bytes: up to so many bytes of text, the split is held in memory as ids.
        shuffle_bytes: bytes of text in one window of a larger split.
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
        """How pieces are shuffled, in words: places in data that is shuffled in different ways are not comparable."""
        return "in memory" if self.is_in_memory else f"in windows of {self.shuffle_bytes / 1e6:g} MB"

    @cached_property
    def _slices(self) -> list[Slice]:
        """What this rank reads; in memory everybody reads everything, and pieces are dealt instead of slices."""
        most = np.inf if self.is_in_memory else min(self.shuffle_bytes, self.num_bytes / self.world) / SLICES
        slices = []
        for group in self.corpus.groups(self.split):
            num_bytes = self.corpus.num_bytes(self.split, group)
            count = max(1, -int(-num_bytes // most))
            slices += [Slice(group, first, count, num_bytes // count) for first in range(count)]
        if self.is_in_memory:
            return slices
        # The same in every epoch: ranks stay disjoint even when one is an epoch ahead of another.
        order = permutation(len(slices), self.seed, "shares")
        return [slices[index] for index in order[self.rank :: self.world]]

    @cached_property
    def num_windows(self) -> int:
        """Windows in an epoch."""
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
            # By the middle of the slice, so that windows are about equally large; in integers, which round nowhere.
            if (2 * done + entry.num_bytes) * self.num_windows // (2 * total) == number:
                found.append(entry)
            done += entry.num_bytes
        return found

    def read(self, slices: list[Slice], builder: Builder) -> Iterator[float]:
        """Adds the pieces of some slices to a builder; yields the number of bytes read since the last time."""
        by_group: dict[int, list[Slice]] = defaultdict(list)
        for entry in slices:
            by_group[entry.group].append(entry)
        # Each row group is opened once, however many slices of it there are.
        for group, members in by_group.items():
            firsts, count = {entry.first for entry in members}, members[0].count
            texts = [
                (group, index, document, text)
                for index, (document, text) in enumerate(self.corpus.documents(self.split, group))
                if index % count in firsts
            ]
            bytes_per_char = total_bytes(members) / max(sum(len(text) for *_, text in texts), 1)
            for batch in _batched(texts):
                self._encode(batch, builder)
                yield bytes_per_char * sum(len(text) for *_, text in batch)

    def _encode(self, texts: list[tuple[int, int, int, str]], builder: Builder) -> None:
        for (*key, _), ids in zip(texts, self.tokenizer.encode_batch([text for *_, text in texts]), strict=True):
            builder.add(*key, ids)

    def builder(self) -> Builder:
        return Builder(self.tokenizer.bos, self.max_ids)

    @property
    def _name(self) -> tuple[object, ...]:
        return self.tokenizer, self.split, self.max_ids

    @property
    def held(self) -> Pieces | None:
        """All pieces of the split, if they are in memory already."""
        return _HELD.get(self.corpus, {}).get(self._name)

    def hold(self, pieces: Pieces) -> None:
        """Keeps all pieces of the split for as long as the corpus is in use."""
        _HELD.setdefault(self.corpus, {})[self._name] = pieces

    def share(self, pieces: Pieces) -> Ints:
        """Which pieces of a window belong to this rank."""
        if not self.is_in_memory:
            return np.arange(len(pieces))
        return permutation(len(pieces), self.seed, "shares")[self.rank :: self.world]

    def recall(self, keys: list[Key]) -> Pieces:
        """The pieces behind some keys, read and tokenized again if need be, in the order of the keys."""
        pieces = self.held
        if pieces is None:
            wanted: dict[int, set[int]] = defaultdict(set)
            for group, index, _ in keys:
                wanted[group].add(index)
            builder = self.builder()
            for group, indices in wanted.items():
                texts = enumerate(self.corpus.documents(self.split, group))
                found = [(group, index, document, text) for index, (document, text) in texts if index in indices]
                for batch in _batched(found):
                    self._encode(batch, builder)
            pieces = builder.build()
        places = pieces.find(keys)
        if missing := [key for key in keys if tuple(key) not in places]:
            raise ValueError(f"{self.corpus.name}: no piece {missing[0]} any more; the corpus has changed")
        return pieces.take(np.array([places[tuple(key)] for key in keys], dtype=np.int64))


def total_bytes(slices: list[Slice]) -> int:
    return sum(entry.num_bytes for entry in slices)


def _batched(texts: list[tuple[int, int, int, str]]) -> Iterator[list[tuple[int, int, int, str]]]:
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
