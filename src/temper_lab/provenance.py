"""What a model was trained with: the recipe of its run, and the documents that a recipe reads."""

from __future__ import annotations

from pathlib import Path

from temper_lab.data import Corpus, open_corpus
from temper_lab.recipe import Recipe
from temper_lab.run import RunFolder


def recipe_of(path: Path) -> Recipe | None:
    """What a model was trained with, if it is in the folder of its run."""
    for folder in (RunFolder(path), RunFolder(path.absolute().parent)):
        try:
            if folder.is_run:
                return Recipe.from_dict(folder.recipe(), str(folder.path))
        # A model can be used whatever has become of the notes on its training.
        except ValueError:
            continue
    return None


def corpus_of(recipe: Recipe) -> Corpus:
    """The documents that a recipe reads, or a ValueError if they are not there."""
    data = recipe.data
    path = Path(data.corpus)
    if not path.exists() and ("climbmix" in data.corpus or path.name == "books"):
        what = "books" if path.name == "books" else "--shards K"
        raise ValueError(f"{path} is not there: temper data download {what} --folder {path}")
    return open_corpus(data.corpus, val_fraction=data.val_fraction, max_chars=data.max_chars or None)
