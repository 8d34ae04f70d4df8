"""The model and the text that it is looked at on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from temper_lab.data import Corpus, open_corpus, validation_batches
from temper_lab.eval.models import is_theirs
from temper_lab.load import load
from temper_lab.model import GPT
from temper_lab.provenance import corpus_of, recipe_of


def open_network(path: Path) -> tuple[GPT, Any]:
    """A model of the lab and its tokenizer: from a run, from a model folder, or exported for transformers."""
    if not is_theirs(path):
        return load(path)
    from temper_lab.eval.hugging_face import load_theirs

    theirs, tokenizer = load_theirs(path)
    network = getattr(theirs, "model", None)
    if not isinstance(network, GPT):
        raise ValueError(f"{path} holds a {type(theirs).__name__}; expected a model of this lab (TemperForCausalLM)")
    return network, tokenizer


def rows_of_text(
    path: Path, network: GPT, tokenizer: Any, tokens: int, text: str | None, corpus: str | None
) -> tuple[Tensor, Tensor, str]:
    """Ids and targets (B, T) of about so many tokens, and where they are from."""
    context = min(network.config.context, tokens)
    if text is not None:
        ids = torch.tensor(tokenizer.encode_batch([text], bos=True))[:, : context + 1]
        if ids.shape[1] < 3:
            raise ValueError(f"--text {text!r} has {ids.shape[1] - 1} tokens; expected at least two")
        return ids[:, :-1], ids[:, 1:], "the given text"
    opened = _open(path, corpus)
    ids, targets = validation_batches(opened, tokenizer, max(1, tokens // context), context, 1)[0]
    return ids, targets, f"validation text of {opened.name}"


def _open(path: Path, corpus: str | None) -> Corpus:
    if corpus is not None:
        return open_corpus(corpus)
    recipe = recipe_of(path)
    try:
        return open_corpus("sotu") if recipe is None else corpus_of(recipe)
    # A run that was made elsewhere names a corpus that need not be here.
    except (ValueError, OSError):
        return open_corpus("sotu")
