"""`temper eval`: what a trained model is worth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import tyro


def bpb(
    model: Path,
    corpus: str = "sotu",
    batches: int = 50,
    rows: int = 8,
    context: int | None = None,
    val_fraction: float = 0.05,
    device: str = "auto",
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Bits per byte of a model on the validation documents of a corpus.

        temper eval bpb --model runs/smoke --corpus sotu
        temper eval bpb --model runs/smoke/best --corpus data/climbmix --batches 200 --json
        temper eval bpb --model models/gpt2 --corpus sotu --context 1024

    The bytes are those of the text, so models with different tokenizers can be compared.

    Args:
        model: A model folder, the folder of a run, or a Hugging Face folder (a causal language model, its tokenizer).
        corpus: "sotu", a folder of parquet, txt, md or jsonl files, or one such file.
        batches: How many batches at most; no text comes twice.
        rows: Rows per batch.
        context: Tokens per row; the model's context if left out, of other people's models 2,048 at most.
        val_fraction: The share of documents that is validation text, as it was in training.
        device: Where to compute; "auto" is the GPU if there is one.
        as_json: Print JSON.
    """
    from temper_lab.data import open_corpus, validation_batches
    from temper_lab.distributed import precision, session
    from temper_lab.eval import bits_per_byte
    from temper_lab.eval.models import open_losses
    from temper_lab.progress import Bar

    for name, value in (("batches", batches), ("rows", rows), ("context", 1 if context is None else context)):
        if value < 1:
            raise ValueError(f"--{name} is {value}; expected at least 1")
    with session(device) as world:
        opened = open_losses(model, device=world.device)
        tokenizer, context = opened.tokenizer, context or opened.context
        if context > opened.limit:
            raise ValueError(f"--context is {context}; this model reads {opened.limit} tokens at most")
        texts = open_corpus(corpus, val_fraction=val_fraction)
        fixed = validation_batches(texts, tokenizer, rows, context, batches, is_shown=world.is_first)
        _, autocast = precision("auto", world.device)
        with Bar("evaluating", -(-len(fixed) // world.size), is_shown=world.is_first) as bar:
            options: dict[str, Any] = {"world": world, "autocast": autocast, "progress": bar.update}
            result = bits_per_byte(opened.losses, fixed, tokenizer.token_bytes, **options)
    if not world.is_first:
        return
    numbers = {"bpb": result.bpb, "loss": result.loss, "tokens": result.num_tokens, "bytes": result.num_bytes}
    if as_json:
        print(json.dumps(numbers))
    else:
        print(
            f"bpb {result.bpb:.4f}  loss {result.loss:.4f}  ({result.num_tokens:,} tokens, {result.num_bytes:,} bytes)"
        )
