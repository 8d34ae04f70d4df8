"""`temper data`: look at a corpus, download one."""

from __future__ import annotations

import array
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

if TYPE_CHECKING:
    from temper_lab.data import Corpus


def info(
    corpus: str = "sotu",
    val_fraction: float = 0.05,
    batches: int = 100,
    rows: int = 16,
    context: int = 256,
    in_memory_mb: int = 1000,
    shuffle_mb: int = 128,
) -> None:
    """Count what a corpus holds, and measure how well its training batches are mixed.

        temper data info
        temper data info --corpus data/climbmix --batches 0
        temper data info --corpus data/books --context 128 --rows 8

    Well mixed means that a batch has text of as many documents as if each piece of text had been drawn on its own.

    Args:
        corpus: "sotu", a folder of parquet, txt, md or jsonl files, or one such file.
        val_fraction: The share of documents kept for validation.
        batches: How many batches to measure on; 0 only counts. A corpus that fits in memory is tokenized for it.
        rows: Rows per batch.
        context: Tokens per row.
        in_memory_mb: MB of text up to which a corpus is shuffled as a whole (`data.in_memory_mb` of a recipe).
        shuffle_mb: MB of text that are shuffled at a time in a larger one (`data.shuffle_mb` of a recipe).
    """
    from temper_lab.data import open_corpus
    from temper_lab.progress import Bar

    least = {"batches": 0, "rows": 1, "context": 1, "in-memory-mb": 0, "shuffle-mb": 1}
    for (name, bound), value in zip(least.items(), (batches, rows, context, in_memory_mb, shuffle_mb), strict=True):
        if value < bound:
            raise ValueError(f"--{name} is {value}; expected at least {bound}")
    opened = open_corpus(corpus, val_fraction=val_fraction)
    print(opened)
    print(f"fingerprint {opened.fingerprint}")
    sizes: dict[str, array.array[int]] = {}
    for split in ("train", "val"):
        groups = opened.groups(split)
        # Bytes of each document; its texts are read one after the other.
        sizes[split] = array.array("q")
        num_texts = num_chars = 0
        last = None
        with Bar(f"reading {split}", len(groups)) as bar:
            for count, group in enumerate(groups, 1):
                for document, text in opened.documents(split, group):
                    if document != last:
                        sizes[split].append(0)
                        last = document
                    sizes[split][-1] += len(text.encode())
                    num_texts, num_chars = num_texts + 1, num_chars + len(text)
                bar.update(count, f"{len(sizes[split]):,} documents")
        print(
            f"{split:<5} {len(sizes[split]):,} documents ({num_texts:,} texts), {num_chars:,} characters, "
            f"{sum(sizes[split]):,} bytes"
        )
    if batches:
        _show_mixing(opened, sizes["train"], batches, rows, context, in_memory_mb, shuffle_mb)


def _show_mixing(
    corpus: Corpus, sizes: array.array[int], batches: int, rows: int, context: int, in_memory_mb: int, shuffle_mb: int
) -> None:
    from temper_lab.data import Loader
    from temper_lab.data.mixing import measure
    from temper_lab.train import train_tokenizer

    # Any tokenizer of about the right size will do.
    tokenizer = train_tokenizer(corpus, 2048, 4_000_000)
    ratio = tokenizer.bytes_per_token(islice(corpus.texts("train"), 100))
    options = {"rows": rows, "context": context, "in_memory_mb": in_memory_mb, "shuffle_mb": shuffle_mb}
    with Loader(corpus, tokenizer, split="train", **options) as loader:
        mixing = measure(loader.stream(), rows, batches, (-(-size // (ratio * context)) for size in sizes))
        order = loader.order
    print(
        f"batches of {rows} x {context} tokens (vocabulary {tokenizer.vocab_size:,}, shuffled {order}): "
        f"{mixing.documents:.1f} documents each; {mixing.independent:.1f} in independent draws "
        f"(mean of {mixing.num_batches})"
    )


def download(
    what: Annotated[Literal["climbmix", "books"], tyro.conf.Positional] = "climbmix",
    shards: int | None = None,
    folder: Path | None = None,
    source: str | None = None,
) -> None:
    """Bring a corpus into a folder; what arrived stays, so run it again after a failure.

        temper data download --shards 8
        temper data download --shards 60 --folder /data/climbmix
        temper data download books
        temper data download books --source /mnt/shared/books

    ClimbMix is a large web corpus in shuffled shards. The books are 52 public-domain books in English, 32 MB; each is
    compared with its SHA-256.

    Args:
        what: The corpus.
        shards: ClimbMix: how many training shards of about 100 MB and 60 million tokens; the validation shard comes
            along.
        folder: Where it goes; `data/climbmix` or `data/books` if left out.
        source: The address of a mirror, or a local folder with the same files.
    """
    from temper_lab import data
    from temper_lab.progress import Bar, size

    if (shards is None) == (what == "climbmix"):
        expected = "expected --shards K, such as 8" if shards is None else "--shards is for climbmix"
        raise ValueError(f"temper data download {what}: {expected}")
    folder = folder or Path("data") / what
    with Bar("downloading", None) as bar:
        started = False

        def show(done: int, total: int) -> None:
            nonlocal started
            if not started:
                started = True
                bar.expect(total)
            bar.update(done, f"{size(done)} of {size(total)}")

        if shards is None:
            paths, kind = data.download_books(folder, source=source, progress=show), "verified books"
        else:
            paths, kind = data.download(shards, folder, source=source, progress=show), "shards"
    print(f"{len(paths)} {kind} in {folder}, {size(sum(path.stat().st_size for path in paths))}")


def check(folder: Path = Path("data/books")) -> None:
    """Compare a folder of the books with their SHA-256, changing nothing.

        temper data check
        temper data check --folder /mnt/shared/books

    Args:
        folder: What `temper data download books` made, or somebody's copy of it.
    """
    from temper_lab.data.download import check as compare
    from temper_lab.data.sources import Manifest

    manifest = Manifest.load("books")
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; temper data download books --folder {folder}")
    troubles = compare(manifest, folder)
    for line in troubles:
        print(line)
    if troubles:
        raise ValueError(
            f"{len(troubles)} of {len(manifest.files)} books in {folder} are missing or different; "
            f"fetch them again: temper data download books --folder {folder}"
        )
    print(f"{len(manifest.files)} books in {folder}, all as in {manifest.repository} at {manifest.revision[:7]}")
