"""Batches of packed rows for one rank, made in the background, with a state that resumes exactly."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from temper.registry import is_int
from temper_lab.console import Bar, size
from temper_lab.data.corpus import Corpus
from temper_lab.data.reader import ORDER_VERSION, Place, Reader, Stream, Window
from temper_lab.io import brief
from temper_lab.tokenizer import Tokenizer

Batch = tuple[torch.Tensor, torch.Tensor]
State = dict[str, Any]

# A validation split of at most this many bytes is tokenized as a whole, and batches are drawn from all of it.
VALIDATION_BYTES = 32e6
# The most rows of one batch; a small split repeats itself to fill them.
MAX_ROWS = 1 << 16
# Seconds after which waiting shows a progress bar.
PATIENCE = 2.0


@dataclass(frozen=True)
class DataFingerprint:
    """The text and the order of batches; with the same recipe and tokenizer they give the same batches.

    Args:
        corpus: a hash of the names, sizes and ends of the files, and of how they are cut and split.
        content: a hash of all bytes of the files; null for a large corpus.
        order: the version of the order of batches.
    """

    corpus: str
    content: str | None
    order: int

    @classmethod
    def of(cls, corpus: Corpus) -> DataFingerprint:
        return cls(corpus.fingerprint, corpus.content, ORDER_VERSION)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Any) -> DataFingerprint:
        """Reads the output of `to_dict`; a ValueError says what was expected."""
        found = values if isinstance(values, Mapping) else {}
        corpus, content, order = (found.get(name) for name in ("corpus", "content", "order"))
        if not isinstance(corpus, str) or not isinstance(content, str | None) or not is_int(order):
            raise ValueError(f"data is {brief(values)}; expected corpus, content and order")
        return cls(corpus, content, order)

    def changes(self, now: DataFingerprint) -> list[str]:
        """The differences in words; empty if the batches are the same."""
        found = []
        if self.corpus != now.corpus:
            found.append(f"the corpus (names, sizes and ends of its files) was {self.corpus}, is {now.corpus}")
        elif None not in (self.content, now.content) and self.content != now.content:
            found.append(f"the content of the corpus was {self.content}, is {now.content}")
        if self.order != now.order:
            found.append(f"the version of the order of batches was {self.order}, is {now.order}")
        return found


class Loader:
    """An endless iterator of (inputs, targets), each int64 of shape (rows, context), targets one id ahead.

    Args:
        rows: rows per batch of this rank; the one setting that may change between saving and resuming.
        context: T; a row is packed from T + 1 ids.
        rank, world: this shard of the data, and the number of disjoint shards.
        cut_long: cut texts that are too long for a row into several pieces; otherwise only their beginning is used.
        in_memory_mb: a split of at most this many MB of text is held in memory as ids, and an epoch is one
            permutation of all its pieces.
        shuffle_mb: the size, in MB of text, of the windows in which a larger split is shuffled.
        prefetch: the number of batches to make ahead.
    """

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: Tokenizer,
        *,
        split: str,
        rows: int,
        context: int,
        rank: int = 0,
        world: int = 1,
        seed: int = 0,
        cut_long: bool = True,
        in_memory_mb: float = 1000,
        shuffle_mb: float = 128,
        prefetch: int = 4,
    ) -> None:
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} of {world}; expected 0 to {world - 1}")
        _check_rows(rows)
        for name, value in (("context", context), ("prefetch", prefetch)):
            if value < 1:
                raise ValueError(f"{name} is {value}; expected at least 1")
        self.rows = rows
        self.context = context
        self.prefetch = prefetch
        self._reader = Reader(
            corpus,
            tokenizer,
            split,
            rank=rank,
            world=world,
            seed=seed,
            max_ids=context + 1 if cut_long else None,
            in_memory_bytes=in_memory_mb * 1e6,
            shuffle_bytes=shuffle_mb * 1e6,
        )
        self._made_for: State = {
            "corpus": corpus.fingerprint,
            "tokenizer": tokenizer.fingerprint,
            "split": split,
            "context": context,
            "rank": rank,
            "world": world,
            "seed": seed,
            "cut_long": cut_long,
            "order": self._reader.order,
            "order_version": ORDER_VERSION,
        }
        self._place = Place()
        self._stream: Stream | None = None
        self._worker: _Worker | None = None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._worker is None:
            self.prepare(is_shown=False)
            assert self._stream is not None
            self._worker = _Worker(_batches(self._stream, self.rows), self.prefetch)
            # A loader that is dropped without `close` ends its thread.
            self._finish = weakref.finalize(self, self._worker.stop)
        batch: Batch
        try:
            batch, self._place = self._worker.next()
        except BaseException:
            self.close()
            raise
        return batch

    def prepare(self, *, is_shown: bool = True) -> None:
        """Reads what the next batch needs, with a progress bar; without this call, the first batch reads it."""
        if self._stream is None:
            self._stream = self.stream(is_shown=is_shown)

    def stream(self, *, is_shown: bool = True) -> Stream:
        """The rows of the coming batches."""
        stream = Stream(self._reader, self.context + 1, self._place)
        _prepare(stream, is_shown)
        return stream

    @property
    def order(self) -> str:
        """The kind of shuffling: "in memory", or "in windows of 128 MB"."""
        return self._reader.order

    @property
    def epoch(self) -> int:
        """The epoch of the next row."""
        return self._place.epoch

    def state_dict(self) -> State:
        """The position after the last batch that was returned, as plain JSON values."""
        return {"made_for": dict(self._made_for), "place": dataclasses.asdict(self._place)}

    def load_state_dict(self, state: State) -> None:
        """Continues from a saved position, or raises ValueError if that position is in other data."""
        if isinstance(state, dict) and "cursor" in state:
            raise ValueError(
                "its place in the data was saved by an earlier version, which read the text in another order, so it "
                "cannot be continued exactly. Start the run again in a new folder, or finish it with that version"
            )
        fields = {field.name for field in dataclasses.fields(Place)}
        place = state.get("place") if isinstance(state, dict) else None
        if not isinstance(place, dict) or place.keys() != fields or not isinstance(state.get("made_for"), dict):
            raise ValueError(
                f"not the state of a loader; expected made_for, and a place of {', '.join(sorted(fields))}"
            )
        # The first version whose places are like these did not record itself.
        saved = {"order_version": 2, **state["made_for"]}
        changed = [
            f"{key} was {saved.get(key)!r}, is {value!r}"
            for key, value in self._made_for.items()
            if saved.get(key) != value
        ]
        if changed:
            raise ValueError(f"the saved place is in other data, resuming would not be exact: {'; '.join(changed)}")
        self.close()
        self._place = Place(**{**place, "carried": [list(key) for key in place["carried"]]})

    def close(self) -> None:
        """Ends the background thread. The next batch starts a new one at the same position."""
        # The thread is ahead of the batches that were returned.
        self._stream = None
        if self._worker is not None:
            self._worker = None
            self._finish()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def validation_batches(
    corpus: Corpus,
    tokenizer: Tokenizer,
    rows: int,
    context: int,
    num_batches: int,
    *,
    cut_long: bool = True,
    is_shown: bool = True,
) -> list[Batch]:
    """Batches of the validation split, the same every time, drawn from all of it.

    No text is used twice, so there may be fewer than `num_batches`; only a split too small for one batch repeats.

    Args:
        is_shown: show a progress bar; false on every process but one.
    """
    _check_rows(rows)
    options: dict[str, Any] = {"in_memory_bytes": VALIDATION_BYTES, "shuffle_bytes": VALIDATION_BYTES}
    reader = Reader(corpus, tokenizer, "val", max_ids=context + 1 if cut_long else None, **options)
    stream = Stream(reader, context + 1)
    taken: list[tuple[Window, int]] = []
    _prepare(stream, is_shown)
    while len(taken) < rows * num_batches and (stream.place.epoch == 0 or len(taken) < rows):
        taken.append(next(stream))
    return [_tensors(taken[start : start + rows]) for start in range(0, len(taken) - rows + 1, rows)]


def _check_rows(rows: int) -> None:
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"rows is {rows:,}; expected 1 to {MAX_ROWS:,}")


def _prepare(stream: Stream, is_shown: bool) -> None:
    """Reads what the next row needs, with a progress bar if that takes long."""
    start = time.monotonic()
    with ExitStack() as stack:
        bar: Bar | None = None

        def tell(done: float, total: float) -> None:
            nonlocal bar
            if bar is None and time.monotonic() - start > PATIENCE:
                bar = stack.enter_context(Bar("tokenizing", total, is_shown=is_shown))
            if bar is not None:
                bar.update(done, f"{size(done)} of {size(total)}")

        stream.prepare(tell)


def _batches(stream: Stream, rows: int) -> Iterator[tuple[Batch, Place]]:
    """Batches from a position on, each with the position after it."""
    while True:
        batch = _tensors(list(islice(stream, rows)))
        yield batch, stream.place


def _tensors(taken: list[tuple[Window, int]]) -> Batch:
    rows = torch.from_numpy(np.stack([window.ids(row) for window, row in taken]).astype(np.int64))
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


class _Worker:
    """A thread that stays up to `depth` items ahead of its consumer."""

    def __init__(self, items: Iterator[Any], depth: int) -> None:
        self._items = items
        self._ready: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._room = threading.Semaphore(depth)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="temper-loader", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while True:
                self._room.acquire()
                if self._stopping:
                    return
                self._ready.put((next(self._items), None))
        except BaseException as error:
            self._ready.put((None, error))

    def next(self) -> Any:
        item, error = self._ready.get()
        if error is not None:
            raise error
        self._room.release()
        return item

    def stop(self) -> None:
        self._stopping = True
        self._room.release()
        # The garbage collector may call this from any thread, including the worker's own.
        if self._thread is not threading.current_thread():
            self._thread.join()


@dataclass(frozen=True)
class Mixing:
    """Means over some batches.

    Args:
        documents: the number of distinct documents in a batch.
        independent: the number expected if every piece of a batch were drawn independently from the whole split.
    """

    num_batches: int
    documents: float
    independent: float


def measure_mixing(stream: Stream, rows: int, num_batches: int, pieces_per_document: Iterable[float]) -> Mixing:
    """Counts documents in the first batches of a stream, at most an epoch of them.

    Args:
        rows: rows per batch.
        pieces_per_document: the pieces of each document of the split, in any order.
    """
    found: list[int] = []
    pieces: list[int] = []
    while len(found) < num_batches and stream.place.epoch == 0:
        members = [member for window, row in islice(stream, rows) for member in window.members(row)]
        found.append(len({int(group.documents[index]) for group, index in members}))
        pieces.append(len(members))
    weights = np.fromiter(pieces_per_document, dtype=np.float64)
    independent = [expected_distinct(weights, num) for num in pieces]
    return Mixing(len(found), float(np.mean(found)), float(np.mean(independent)))


def expected_distinct(weights: NDArray[np.float64], num_draws: int) -> float:
    """The expected number of distinct documents in independent draws with probabilities proportional to weights."""
    # Equal weights are computed once: there are few different ones, however many documents there are.
    values, counts = np.unique(weights, return_counts=True)
    return float((counts * (1 - (1 - values / weights.sum()) ** num_draws)).sum())
