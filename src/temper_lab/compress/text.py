"""The text that a compression reads: training text to calibrate and finetune on, validation text to measure on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from temper_lab.compress.settings import Settings
from temper_lab.compress.subject import Subject
from temper_lab.data import Corpus, Loader, open_corpus, validation_batches
from temper_lab.recipe import Recipe

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Text:
    """Batches for one model.

    Args:
        train: calibrates and finetunes; None if neither is asked for.
        val: measures; None where there is no corpus to measure on.
        note: why there is none.
    """

    train: Corpus | None
    val: Corpus | None
    rows: int
    context: int
    num_batches: int
    seed: int
    note: str = ""

    @contextmanager
    def training(self, subject: Subject) -> Iterator[Iterator[Batch]]:
        """Endless batches of training text, the same for the same seed."""
        assert self.train is not None
        options = {"split": "train", "rows": self.rows, "context": self.context, "seed": self.seed}
        # Little text is read, so a large corpus is not tokenized as a whole.
        options |= {"in_memory_mb": 32, "shuffle_mb": 32}
        with Loader(self.train, subject.tokenizer, **options) as loader:
            loader.prepare()
            yield loader

    def validation(self, subject: Subject) -> list[Batch]:
        if self.val is None:
            return []
        return validation_batches(self.val, subject.tokenizer, self.rows, self.context, self.num_batches)


def open_text(settings: Settings, subject: Subject, recipe: Recipe | None) -> Text:
    """Whatever corpora the settings name, or that of the run; a ValueError for one that is named and cannot be read."""
    context = settings.context or subject.context
    if not 1 <= context <= subject.limit:
        raise ValueError(f"--context is {context}; this model reads 1 to {subject.limit} tokens")
    data = None if recipe is None else recipe.data
    options = {"val_fraction": settings.val_fraction or (data.val_fraction if data else 0.05)}
    if data is not None:
        options["max_chars"] = data.max_chars or None
    train, val, note = None, None, ""
    named = settings.calibrate or settings.corpus
    if settings.calibrate is not None:
        train = open_corpus(settings.calibrate, **options)
    if named is not None:
        val = train if settings.corpus in (None, settings.calibrate) else open_corpus(settings.corpus, **options)
    elif data is not None:
        try:
            val = open_corpus(data.corpus, **options)
        except ValueError as error:
            note = f"bits per byte were not measured: {error}"
    else:
        note = "bits per byte were not measured: name a --corpus"
    if settings.finetune and train is None:
        if val is None:
            raise ValueError(f"--finetune needs a corpus: --corpus or --calibrate. {note}".rstrip())
        train = val
    sizes = {"rows": settings.rows, "context": context, "num_batches": settings.batches, "seed": settings.seed}
    return Text(train, val, note=note, **sizes)
