"""Batches of packed rows for one rank, made in the background, with a state that resumes exactly."""

from __future__ import annotations

import array
import copy
import queue
import threading
import weakref
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

from temper_lab.data.corpus import Corpus
from temper_lab.data.packing import Packer
from temper_lab.data.reader import START, Reader, Stream
from temper_lab.tokenizer import Tokenizer

Batch = tuple[torch.Tensor, torch.Tensor]
State = dict[str, Any]


class Loader:
    """An endless iterator of (inputs, targets), each int64 of shape (rows, context), targets one id ahead.

    Args:
        rows: rows per batch of this rank; the one setting that may change between saving and resuming.
        context: T; a row is packed from T + 1 ids.
        rank, world: which of how many disjoint shares of the documents.
        cut_long: documents too long for a row become several documents; if not, a crop drops all but their beginning.
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
        max_ids = context + 1 if cut_long else None
        self._reader = Reader(corpus, tokenizer, split, rank=rank, world=world, seed=seed, max_ids=max_ids)
        self._made_for: State = {
            "corpus": corpus.fingerprint,
            "tokenizer": tokenizer.fingerprint,
            "split": split,
            "context": context,
            "rank": rank,
            "world": world,
            "seed": seed,
            "cut_long": cut_long,
        }
        corpus.groups(split)
        self._place: State = {"cursor": START, "buffer": []}
        self._worker: _Worker | None = None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._worker is None:
            self._worker = _Worker(_batches(self._reader, self.rows, self.context, self._place), self.prefetch)
            # A loader that is dropped without `close` takes its thread along.
            self._finish = weakref.finalize(self, self._worker.stop)
        batch: Batch
        try:
            batch, self._place = self._worker.next()
        except BaseException:
            self.close()
            raise
        return batch

    @property
    def epoch(self) -> int:
        """The epoch that documents are being read from; the buffer may still hold earlier ones."""
        return int(self._place["cursor"][0])

    def state_dict(self) -> State:
        """The place after the last batch that was handed out, as plain JSON values."""
        return copy.deepcopy({"made_for": self._made_for, **self._place})

    def load_state_dict(self, state: State) -> None:
        """Continues from a saved place; a ValueError if that place is in other data."""
        if not isinstance(state, dict) or {"made_for", "cursor", "buffer"} - state.keys():
            raise ValueError("not the state of a loader; expected made_for, cursor and buffer")
        saved = state["made_for"]
        changed = [
            f"{key} was {saved.get(key)!r}, is {value!r}"
            for key, value in self._made_for.items()
            if saved.get(key) != value
        ]
        if changed:
            raise ValueError(f"the saved place is in other data, resuming would not be exact: {'; '.join(changed)}")
        self.close()
        self._place = copy.deepcopy({"cursor": state["cursor"], "buffer": state["buffer"]})

    def close(self) -> None:
        """Ends the background thread. Asking for another batch starts a new one at the same place."""
        if self._worker is not None:
            self._worker = None
            self._finish()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def validation_batches(
    corpus: Corpus, tokenizer: Tokenizer, rows: int, context: int, num_batches: int, *, cut_long: bool = True
) -> list[Batch]:
    """Fixed batches of the validation split, the same every time.

    No text comes twice, so there may be fewer than `num_batches`; only a split too small for one batch repeats itself.
    """
    reader = Reader(corpus, tokenizer, "val", max_ids=context + 1 if cut_long else None)
    once = Packer((keyed for _, keyed in reader.epoch(0)), context + 1)
    packed = list(islice(once, rows * num_batches))
    if len(packed) < rows:
        packed = list(islice(Packer(Stream(reader, START), context + 1), rows))
    return [_tensors(packed[start : start + rows]) for start in range(0, len(packed) - rows + 1, rows)]


def _batches(reader: Reader, rows: int, context: int, place: State) -> Iterator[tuple[Batch, State]]:
    """Batches from a place on, each with the place after it."""
    stream = Stream(reader, place["cursor"])
    packer = Packer(stream, context + 1, buffered=reader.recall(place["buffer"]))
    while True:
        batch = _tensors(list(islice(packer, rows)))
        yield batch, {"cursor": stream.cursor, "buffer": packer.keys()}


def _tensors(packed: list[list[int]]) -> Batch:
    # Through an array, which torch takes over as it is: ten times faster than a list of lists.
    ids = array.array("q", [index for row in packed for index in row])
    rows = torch.frombuffer(ids, dtype=torch.int64).view(len(packed), -1)
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
