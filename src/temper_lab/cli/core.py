"""`temper eval core`: accuracy in the tasks of CORE."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

if TYPE_CHECKING:
    from temper_lab.eval.core import Bundle


def core(
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
    """CORE: accuracy in 22 tasks of common sense, language, knowledge and symbols, centered so that guessing is 0.

        temper eval core --model runs/smoke --bundle data/core --max-per-task 100
        temper eval core --model runs/n4 --bundle data/core --out results/n4.json
        temper eval core --model models/gpt2 --bundle eval_bundle.zip --tasks arc_easy,copa
        temper eval core --model runs/n4 --bundle data/core --download https://ADDRESS/eval_bundle.zip
        torchrun --nproc-per-node 4 -m temper_lab eval core --model runs/n4 --bundle data/core --out results/n4.json

    A bundle is a folder with core.yaml, eval_meta_data.csv (which has the accuracy of guessing) and eval_data/.
    With --out, the same command goes on where an interrupted evaluation stopped. There is a CORE only if none of its
    22 tasks is missing; otherwise the missing ones are named.

    Args:
        model: A model folder, the folder of a run, or a Hugging Face folder (a causal language model, its tokenizer).
        bundle: The folder of the bundle, or a zip of it.
        max_per_task: Only so many items of each task, the same ones every time.
        tasks: Only these tasks, separated by commas.
        out: The file for the results, JSON with the answer to every item; CSV goes beside it (or the other way round).
        download: The address of a zip, which is unpacked as --bundle unless that is there already.
        sha256: What the SHA-256 of that zip has to be; it is printed if left out.
        device: Where to compute; "auto" is the GPU if there is one.
        as_json: Print JSON.
    """
    if max_per_task is not None and max_per_task < 1:
        raise ValueError(f"--max-per-task is {max_per_task}; expected at least 1")
    labels = None if tasks is None else [label.strip() for label in tasks.split(",") if label.strip()]
    if labels == []:
        raise ValueError("--tasks names no task; expected labels of the bundle's core.yaml, separated by commas")
    if sha256 is not None and download is None:
        raise ValueError("--sha256 is of what --download brings, which is not given")
    json_path, csv_path = _outputs(out)

    from temper_lab.distributed import precision, session
    from temper_lab.eval.core import Partial, evaluate_task, report
    from temper_lab.eval.models import open_model
    from temper_lab.io import atomic_write
    from temper_lab.progress import Bar

    with session(device) as world:
        # One process reads, and everybody gets the same items.
        opened = world.first(lambda: _open(bundle, labels, max_per_task, download, sha256))
        network = open_model(model, device=world.device)
        _, autocast = precision("auto", world.device)
        keeper = json_path if world.is_first else None
        if keeper is not None:
            keeper.parent.mkdir(parents=True, exist_ok=True)
        partial = Partial(keeper, network.fingerprint() if keeper is not None else "")
        options: dict[str, Any] = {"world": world, "partial": partial, "autocast": autocast}
        results = {}
        try:
            for task in opened.tasks:
                with Bar(task.label, len(task.items), is_shown=world.is_first) as bar:
                    results[task.label] = evaluate_task(network, task, progress=bar.update, **options)
        except KeyboardInterrupt:
            if keeper is not None:
                print("the answers so far are kept; the same command goes on from there", file=sys.stderr)
            raise
    if not world.is_first:
        return
    if json_path is not None and csv_path is not None:
        atomic_write(csv_path, report.as_csv(results))
        atomic_write(json_path, report.as_json(results))
        partial.forget()
    if as_json:
        print(report.as_json(results), end="")
        return
    report.print_table(results)
    lines = report.summary_lines(results, baselines=opened.baselines, max_per_task=max_per_task)
    for line in (*lines, *network.notes):
        print(line)
    if json_path is not None:
        print(f"results in {json_path} and {csv_path}")


def _outputs(out: Path | None) -> tuple[Path | None, Path | None]:
    """Where JSON and CSV go: the name that was given says which of them it is for."""
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
    """The bundle that was asked for, from a folder, a zip or the network."""
    from temper_lab.eval.core import archive, load_bundle

    if download is not None:
        _download(bundle, download, sha256)
    elif not bundle.exists():
        raise ValueError(
            f"there is no {bundle}; expected the folder of an evaluation bundle or a zip of it (--download brings one)"
        )
    with archive.opened(bundle) as folder:
        try:
            found = load_bundle(folder, labels=labels, max_per_task=max_per_task)
        except ValueError as error:
            # A zip is called by its name, not by where it was unpacked.
            raise ValueError(str(error).replace(str(folder), str(bundle))) from error
        return replace(found, baselines=found.baselines.replace(str(folder), str(bundle)))


def _download(bundle: Path, address: str, sha256: str | None) -> None:
    from temper_lab.eval.core import archive
    from temper_lab.progress import Bar, size

    archive.check_address(address)
    if bundle.exists():
        print(f"{bundle} is there already and is not downloaded again", file=sys.stderr)
        return
    with Bar("downloading", None) as bar:

        def show(done: int, total: int | None) -> None:
            if total is not None and bar.total is None:
                bar.expect(total)
            bar.update(done, size(done))

        found = archive.download(address, bundle, sha256=sha256, progress=show)
    print(f"{bundle}: unpacked from a zip with the SHA-256 {found}", file=sys.stderr)
