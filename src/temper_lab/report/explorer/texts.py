"""Texts to look at: passages of the documents that a run was validated on, and one that is always there."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path

from temper_lab.provenance import corpus_of, recipe_of
from temper_lab.tokenizer import Tokenizer

# Numbers, signs, a name and words that come again.
ALWAYS = (
    "The people of the United States, and the people of every state, have asked for peace. "
    'In 1947 the budget was 38 billion; in 1948 it was 33. "Why," said Mr. Adams, "have they asked for peace?"'
)
PASSAGES = 3
TOKENS = 64
# Documents that are looked at, and how far into each.
DOCUMENTS, CHARACTERS = 12, 4000


def default_texts(run: Path | None, tokenizer: Tokenizer) -> list[str]:
    """The constant text, and passages of the validation documents if the run's corpus can be opened from here."""
    return [ALWAYS, *(validation_passages(run, tokenizer) if run is not None else [])]


def validation_passages(run: Path, tokenizer: Tokenizer) -> list[str]:
    """Some passages of TOKENS tokens, each from the beginning of a sentence; none without the corpus."""
    recipe = recipe_of(run)
    if recipe is None:
        return []
    try:
        documents = list(itertools.islice(corpus_of(recipe).texts("val"), DOCUMENTS))
    # Where the corpus is not on this machine the constant text is enough.
    except (ValueError, OSError):
        return []
    # The first documents and the last are often by one author.
    stride = max(1, len(documents) // PASSAGES)
    found = (passage(document, tokenizer) for document in documents[::stride])
    return [text for text in found if text][:PASSAGES]


def passage(document: str, tokenizer: Tokenizer) -> str:
    """About TOKENS tokens from somewhere inside a document."""
    start = min(len(document) // 3, CHARACTERS)
    sentence = re.compile(r"[.!?][\u201d\"']?\s+(?=[A-Z\u201c\"])").search(document, start)
    start = sentence.end() if sentence else 0
    ids = tokenizer.encode(document[start : start + CHARACTERS])[:TOKENS]
    # Between two words, so that the text has these tokens again.
    return re.sub(r"\s+", " ", tokenizer.decode(ids).rsplit(" ", 1)[0]).strip()


def titles(texts: Sequence[str]) -> list[str]:
    """The first words of every text."""
    short = [" ".join(text.split())[:44] for text in texts]
    return [f"{start.rsplit(' ', 1)[0]} \u2026" if len(start) == 44 else start or "(empty)" for start in short]
