"""The documents of one rank as token ids, epoch after epoch, in an order that a seed decides."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from temper_lab.data.corpus import Corpus
from temper_lab.data.packing import Keyed
from temper_lab.tokenizer import Tokenizer

Key = list[int]
"""A document's row group, its index there, and its piece."""
Cursor = list[int]
"""The epoch, how many of its row groups are done, documents of the next group, and pieces of the next document."""
START: Cursor = [0, 0, 0, 0]

BATCH = 256


@dataclass(frozen=True)
class Reader:
    """Reads what belongs to one rank.

    Args:
        max_ids: documents of more ids than this, with the BOS, become several, each with a BOS; None leaves them whole.
    """

    corpus: Corpus
    tokenizer: Tokenizer
    split: str
    rank: int = 0
    world: int = 1
    seed: int = 0
    max_ids: int | None = None

    @cached_property
    def _groups(self) -> list[int]:
        groups = self.corpus.groups(self.split)
        if self._by_document:
            return groups
        # Shuffled once, not per epoch: ranks stay disjoint even when one is an epoch ahead of another.
        random.Random(f"{self.seed}/groups").shuffle(groups)
        return groups[self.rank :: self.world]

    @cached_property
    def _by_document(self) -> bool:
        """Too few row groups for everybody: all ranks read all of them, and each keeps its own documents."""
        return len(self.corpus.groups(self.split)) < self.world

    def _texts(self, group: int) -> list[tuple[int, str]]:
        texts = enumerate(self.corpus.documents(self.split, group))
        if not self._by_document:
            return list(texts)
        # Each group starts at another rank, so that short groups reach all ranks.
        first = self._groups.index(group) * self.world // len(self._groups)
        return [(index, text) for index, text in texts if (first + index) % self.world == self.rank]

    def _pieces(self, group: int, texts: list[tuple[int, str]]) -> Iterator[list[Keyed]]:
        """The ids of each document: one list of them, or several if it is long."""
        bos = [self.tokenizer.bos]
        for start in range(0, len(texts), BATCH):
            batch = texts[start : start + BATCH]
            encoded = self.tokenizer.encode_batch([text for _, text in batch])
            for (index, _), ids in zip(batch, encoded, strict=True):
                step = len(ids) if self.max_ids is None else self.max_ids - 1
                firsts = range(0, len(ids), step)
                yield [([group, index, piece], bos + ids[at : at + step]) for piece, at in enumerate(firsts)]

    def epoch(self, epoch: int, after: Cursor = START) -> Iterator[tuple[Cursor, Keyed]]:
        """One pass over the documents, or what is left of it; each comes with the cursor after it."""
        groups = list(self._groups)
        random.Random(f"{self.seed}/{epoch}").shuffle(groups)
        _, groups_done, texts_done, pieces_done = after
        for number, group in enumerate(groups[groups_done:], groups_done):
            texts = self._texts(group)
            random.Random(f"{self.seed}/{epoch}/{group}").shuffle(texts)
            for count, pieces in enumerate(self._pieces(group, texts[texts_done:]), texts_done):
                for done, keyed in enumerate(pieces[pieces_done:], pieces_done + 1):
                    yield [epoch, number, count, done], keyed
                pieces_done = 0
            texts_done = pieces_done = 0

    def recall(self, keys: list[Key]) -> list[Keyed]:
        """The documents behind some keys, read and tokenized again, in the order of the keys."""
        wanted: dict[int, set[int]] = defaultdict(set)
        for group, index, _ in keys:
            wanted[group].add(index)
        found: dict[tuple[int, ...], list[int]] = {}
        for group, indices in wanted.items():
            texts = [(index, text) for index, text in self._texts(group) if index in indices]
            for pieces in self._pieces(group, texts):
                found.update((tuple(key), ids) for key, ids in pieces)
        if missing := [key for key in keys if tuple(key) not in found]:
            raise ValueError(f"{self.corpus.name}: no document {missing[0]} any more; the corpus has changed")
        return [(key, found[tuple(key)]) for key in keys]


class Stream:
    """Epochs without end. `cursor` is the place after the last document that was taken."""

    def __init__(self, reader: Reader, cursor: Cursor) -> None:
        self.cursor = cursor
        self._reader = reader
        self._documents = self._endless()

    def __iter__(self) -> Iterator[Keyed]:
        return self

    def __next__(self) -> Keyed:
        self.cursor, keyed = next(self._documents)
        return keyed

    def _endless(self) -> Iterator[tuple[Cursor, Keyed]]:
        after = self.cursor
        while True:
            empty = after[1:] == START[1:]
            for item in self._reader.epoch(after[0], after):
                empty = False
                yield item
            if empty:
                who = f"rank {self._reader.rank} of {self._reader.world}"
                corpus, split = self._reader.corpus.name, self._reader.split
                raise ValueError(f"{corpus}: no {split} documents for {who}; use fewer processes or a larger corpus")
            after = [after[0] + 1, *START[1:]]
