"""A recipe in, a run folder with a trained model out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from temper_lab import plan
from temper_lab import run as runs
from temper_lab.data import Corpus
from temper_lab.distributed import World, session
from temper_lab.interrupt import StopWish
from temper_lab.io import recover
from temper_lab.load import load
from temper_lab.memory import keep_freed_memory
from temper_lab.model import GPT
from temper_lab.progress import waiting
from temper_lab.provenance import corpus_of
from temper_lab.recipe import Recipe
from temper_lab.run import RunFolder
from temper_lab.tokenizer import FILE_NAME, Tokenizer
from temper_lab.trainer import Trainer


def train(recipe: Recipe, out: str | Path, *, resume: bool = False, recipe_name: str = "recipe") -> int:
    """Trains in a folder, or resumes there; returns 0 when finished, 128 + the signal when interrupted."""
    folder = RunFolder(Path(out))
    wish = StopWish()
    keep_freed_memory()
    if recipe.train.threads:
        torch.set_num_threads(recipe.train.threads)
    with session(recipe.train.device) as world, ExitStack() as stack:
        # Whatever can be found wrong before the folder exists.
        plan.split(recipe, world.size)
        with torch.device("meta"):
            GPT(recipe.model)
        corpus = corpus_of(recipe)
        if recipe.tokenizer.path:
            Tokenizer.load(recipe.tokenizer.path)
        if recipe.train.start and not resume:
            _check_start(recipe)

        def claim() -> None:
            folder.begin(resume=resume)
            stack.enter_context(folder.claimed())
            recover(folder.path)
            recover(folder.checkpoints)
            if resume:
                refuse_changes(folder, recipe)
            about = {"recipe_name": recipe_name, "recipe": recipe.to_dict(), "seed": recipe.train.seed}
            about |= {"versions": runs.versions(), "processes": world.size}
            started = {} if resume else {"started": runs.now(), "best_bpb": None, "step": 0}
            folder.write(**about, **started, status="running", error=None)

        world.first(claim)
        trainer: Trainer | None = None
        try:
            trainer = Trainer(recipe, folder, world, corpus, _tokenizer(recipe, folder, world, corpus), wish)
            is_finished = trainer.run()
            code = 0 if is_finished else 128 + (wish.number or 2)
            ending: dict[str, Any] = {"status": "finished" if is_finished else "interrupted"}
        except BaseException as error:
            is_wish = isinstance(error, KeyboardInterrupt)
            ending = {"status": "interrupted" if is_wish else "failed", "error": str(error) or type(error).__name__}
            raise
        finally:
            if trainer is not None:
                trainer.close()
                ending |= {"step": trainer.step, "best_bpb": trainer.best_bpb}
            if world.is_first:
                folder.write(**ending, ended=runs.now())
            # torchrun ends all processes when one has failed, and the first still has to say why.
            if world.size == 1:
                wish.forget()
    return code


def _check_start(recipe: Recipe) -> None:
    start = recipe.train.start
    model, tokenizer = load(start)
    there, here = model.config.to_dict(), recipe.model.with_(vocab_size=tokenizer.vocab_size).to_dict()
    differing = [
        f"{name} is {there.get(name)!r} there, {here.get(name)!r} here"
        for name in {**there, **here}
        if there.get(name) != here.get(name)
    ]
    if differing:
        raise ValueError(f"train.start {start} holds another model than the recipe: {'; '.join(differing)}")
    if not recipe.tokenizer.path or Tokenizer.load(recipe.tokenizer.path).fingerprint != tokenizer.fingerprint:
        raise ValueError(f"train.start {start} was trained with a tokenizer of its own: --tokenizer.path {start}")


def refuse_changes(folder: RunFolder, recipe: Recipe) -> None:
    """Raises ValueError if a run is not of this recipe."""
    before = Recipe.from_dict(folder.recipe(), str(folder.path))
    # A thread more or less is another machine, not another recipe; a tokenizer is what it holds, wherever it is.
    ignoring = ["train.threads"]
    if _is_same_tokenizer(folder.path / FILE_NAME, recipe.tokenizer.path):
        ignoring.append("tokenizer.path")
    if changes := before.changes(recipe, ignoring):
        raise ValueError(f"{folder.path} is a run of another recipe, so it is not resumed: {'; '.join(changes)}")


def _is_same_tokenizer(mine: Path, other: str) -> bool:
    if not other:
        return False
    # A run that has none yet was killed before its first step.
    if not mine.is_file():
        return True
    return Tokenizer.load(mine).fingerprint == Tokenizer.load(other).fingerprint


def train_tokenizer(corpus: Corpus, vocab_size: int, max_chars: int = 0, *, is_shown: bool = True) -> Tokenizer:
    """A tokenizer from the training documents of a corpus, with something to look at meanwhile."""
    with waiting(f"tokenizer: {vocab_size:,} tokens from {corpus.name}", is_shown=is_shown) as tell:

        def texts() -> Iterator[str]:
            seen = 0
            for text in corpus.texts("train"):
                yield text
                seen += len(text)
                tell(f"{seen / 1e6:,.0f}M characters read")
                if 0 < max_chars <= seen:
                    return

        return Tokenizer.train(texts(), vocab_size)


def _tokenizer(recipe: Recipe, folder: RunFolder, world: World, corpus: Corpus) -> Tokenizer:
    """The tokenizer in the run's folder, which the first process puts there."""

    def make() -> None:
        if (folder.path / FILE_NAME).exists():
            return
        if recipe.tokenizer.path:
            Tokenizer.load(recipe.tokenizer.path).save(folder.path)
        else:
            train_tokenizer(corpus, recipe.model.vocab_size, recipe.tokenizer.train_chars).save(folder.path)

    world.first(make)
    return Tokenizer.load(folder.path)
