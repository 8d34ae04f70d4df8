"""`temper data`: look at a corpus, download ClimbMix."""

from __future__ import annotations

from pathlib import Path


def info(corpus: str = "sotu", val_fraction: float = 0.05) -> None:
    """Count what a corpus holds.

        temper data info
        temper data info --corpus data/climbmix

    Args:
        corpus: "sotu", a folder of parquet, txt, md or jsonl files, or one such file.
        val_fraction: The share of documents kept for validation.
    """
    from temper_lab.data import open_corpus
    from temper_lab.progress import Bar

    opened = open_corpus(corpus, val_fraction=val_fraction)
    print(opened)
    print(f"fingerprint {opened.fingerprint}")
    for split in ("train", "val"):
        groups = opened.groups(split)
        num_documents = num_chars = num_bytes = 0
        with Bar(f"reading {split}", len(groups)) as bar:
            for count, group in enumerate(groups, 1):
                for _, text in opened.documents(split, group):
                    num_documents, num_chars = num_documents + 1, num_chars + len(text)
                    num_bytes += len(text.encode())
                bar.update(count, f"{num_documents:,} documents")
        print(f"{split:<5} {num_documents:,} documents, {num_chars:,} characters, {num_bytes:,} bytes")


def download(shards: int, folder: Path = Path("data/climbmix"), source: str | None = None) -> None:
    """Bring shards of ClimbMix into a folder; what arrived stays, so run it again after a failure.

        temper data download --shards 8
        temper data download --shards 60 --folder /data/climbmix

    Args:
        shards: How many training shards of about 100 MB and 60 million tokens; the validation shard comes along.
        folder: Where they go.
        source: The address of a mirror of the hub, or a local folder with the same files.
    """
    from temper_lab import data
    from temper_lab.progress import Bar, size

    with Bar("downloading", None) as bar:
        started = False

        def show(done: int, total: int) -> None:
            nonlocal started
            if not started:
                started = True
                bar.expect(total)
            bar.update(done, f"{size(done)} of {size(total)}")

        paths = data.download(shards, folder, source=source, progress=show)
    print(f"{len(paths)} shards in {folder}, {size(sum(path.stat().st_size for path in paths))}")
