"""Batches of packed rows for one rank, made in the background, with a state that resumes exactly."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from typing import Any

import numpy as np
import torch

from temper_lab.data.corpus import Corpus
from temper_lab.data.reader import Reader
from temper_lab.data.stream import Place, Stream, Window
from temper_lab.progress import Bar, size
from temper_lab.tokenizer import Tokenizer

Batch = tuple[torch.Tensor, torch.Tensor]
State = dict[str, Any]

# A validation split of up to so many bytes is tokenized as a whole, and what is read is drawn from all of it.
VALIDATION_BYTES = 32e6
# Seconds before waiting gets a progress bar.
PATIENCE = 2.0


class Loader:
    """An endless iterator of (inputs, targets), each int64 of shape (rows, context), targets one id ahead.

    Args:
        rows: rows per batch of this rank; the one setting that may change between saving and resuming.
        context: T; a row is packed from T + 1 ids.
        rank, world: which of how many disjoint shares of the data.
        cut_long: texts too long for a row become several pieces; if not, a crop drops all but their beginning.
        in_memory_mb: a split of up to so many MB of text is held in memory as ids, and an epoch is one permutation of
            all its pieces.
        shuffle_mb: a larger split is shuffled in windows of so many MB of text.
        prefetch: how many batches are made ahead.
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
        for name, value in (("rows", rows), ("context", context), ("prefetch", prefetch)):
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
            # A loader that is dropped without `close` takes its thread along.
            self._finish = weakref.finalize(self, self._worker.stop)
        batch: Batch
        try:
            batch, self._place = self._worker.next()
        except BaseException:
            self.close()
            raise
        return batch

    def prepare(self, *, is_shown: bool = True) -> None:
        """Reads what the next batch needs; the first batch does the same, without a progress bar."""
        if self._stream is None:
            self._stream = self.stream(is_shown=is_shown)

    def stream(self, *, is_shown: bool = True) -> Stream:
        """The rows that batches are made of, from the place of the next batch on."""
        stream = Stream(self._reader, self.context + 1, self._place)
        _prepare(stream, is_shown)
        return stream

    @property
    def order(self) -> str:
        """How the data is shuffled: "in memory", or "in windows of 128 MB"."""
        return self._reader.order

    @property
    def epoch(self) -> int:
        """The epoch that the next row is from."""
        return self._place.epoch

    def state_dict(self) -> State:
        """The place after the last batch that was handed out, as plain JSON values."""
        return {"made_for": dict(self._made_for), "place": dataclasses.asdict(self._place)}

    def load_state_dict(self, state: State) -> None:
        """Continues from a saved place; a ValueError if that place is in other data."""
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
        saved = state["made_for"]
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
        """Ends the background thread. Asking for another batch starts a new one at the same place."""
        # It is ahead of what was handed out.
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
    """Fixed batches of the validation split, the same every time, drawn from all of it.

    No text comes twice, so there may be fewer than `num_batches`; only a split too small for one batch repeats itself.

    Args:
        is_shown: only one of many processes shows a progress bar.
    """
    options = {"in_memory_bytes": VALIDATION_BYTES, "shuffle_bytes": VALIDATION_BYTES}
    reader = Reader(corpus, tokenizer, "val", max_ids=context + 1 if cut_long else None, **options)
    stream, taken = Stream(reader, context + 1), []
    _prepare(stream, is_shown)
    while len(taken) < rows * num_batches and (stream.place.epoch == 0 or len(taken) < rows):
        taken.append(next(stream))
    return [_tensors(taken[start : start + rows]) for start in range(0, len(taken) - rows + 1, rows)]


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
    """Batches from a place on, each with the place after it."""
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
        # The garbage collector may call this from any thread, this one too.
        if self._thread is not threading.current_thread():
            self._thread.join()
