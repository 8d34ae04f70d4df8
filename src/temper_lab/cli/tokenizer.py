"""`temper tokenizer`: train one, look at one."""

from __future__ import annotations

from pathlib import Path


def train(out: Path, corpus: str = "sotu", vocab_size: int = 4096, max_chars: int = 0) -> None:
    """Train a tokenizer on the training documents of a corpus.

        temper tokenizer train --out tokenizers/sotu-4k --vocab-size 4096

    `tokenizer.path` of a recipe then takes that folder.

    Args:
        out: The folder for tokenizer.json.
        corpus: "sotu", a folder of parquet, txt, md or jsonl files, or one such file.
        vocab_size: Tokens, with the 256 bytes and the special one.
        max_chars: Characters to train on, from the start of the corpus; 0 for all.
    """
    from temper_lab.data import open_corpus
    from temper_lab.train import train_tokenizer

    tokenizer = train_tokenizer(open_corpus(corpus), vocab_size, max_chars)
    print(f"{tokenizer.save(out)}: {tokenizer.vocab_size:,} tokens, fingerprint {tokenizer.fingerprint}")


def info(path: Path, corpus: str | None = None, text: str | None = None) -> None:
    """Say what a tokenizer holds and how well it compresses.

        temper tokenizer info --path runs/smoke --corpus sotu
        temper tokenizer info --path tokenizers/sotu-4k --text "My fellow citizens"

    Args:
        path: tokenizer.json or a folder that holds it, such as a run.
        corpus: Measure bytes per token on its validation documents.
        text: Show the tokens of this text.
    """
    from temper_lab.data import open_corpus
    from temper_lab.progress import waiting
    from temper_lab.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(path)
    longest = int(tokenizer.token_bytes.max())
    print(f"{tokenizer.vocab_size:,} tokens of up to {longest} bytes, fingerprint {tokenizer.fingerprint}")
    if corpus is not None:
        with waiting(f"encoding {corpus}"):
            ratio = tokenizer.bytes_per_token(open_corpus(corpus).texts("val"))
        print(f"{ratio:.3f} bytes per token on the validation documents of {corpus}")
    if text is not None:
        ids = tokenizer.encode(text)
        print(" ".join(f"{index}:{tokenizer.decode([index])!r}" for index in ids))
