"""`temper theory`: ranks, bounds and constants of a trained model, measured on text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro


def theory(
    model: Path,
    against: Path | None = None,
    to: Literal["tucker", "cp", "tt"] | None = None,
    rank: str | None = None,
    text: str | None = None,
    corpus: str | None = None,
    tokens: int = 512,
    json_file: Annotated[Path | None, tyro.conf.arg(name="json", metavar="FILE")] = None,
    plot: Path | None = None,
) -> int:
    """What the paper's theory says of a trained model, beside what is measured.

        temper theory --model runs/mhc
        temper theory --model runs/mhc --to tucker --rank 2x12 --plot theory.png
        temper theory --model runs/mhc --against runs/mhc-compressed --json theory.json
        temper theory --model runs/cp --text "The people of the United States have seen peace and war."

    For every site: the rank and nullity of what its logits can see, from singular values; the bounds on logits
    (Lemma) and on the block (Theorem 2) between this model and another, beside the distances measured on real
    activations; the slope of its mixer on real logits. All in float64. A bound that does not hold would be a mistake in
    this program: it is reported, and the exit code is 1.

    Without --against, every site is compared with itself one notch poorer: a dense generator with Tucker at its
    default rank, others with every rank lowered by one (where all ranks are one, with tensors moved by 1%).

    Args:
        model: A model folder, the folder of a run, or a folder of `temper export --to hf`.
        against: Another model with the same backbone, such as a compressed one.
        to: The kind of generator to compare with.
        rank: Its rank: 8, 2x12, or a fraction of the dense parameters such as 0.1.
        text: The text to look at.
        corpus: Look at the validation text of this corpus instead; of the run's own if left out, else of the built-in.
        tokens: How many tokens of a corpus.
        json_file: Write everything to this file.
        plot: Write a figure to this .png, .svg or .pdf file.
    """
    if against is not None and (to is not None or rank is not None):
        raise ValueError("--against names a model and --to and --rank make one; give one or the other")
    if text is not None and corpus is not None:
        raise ValueError("--text and --corpus are both text to look at; give one of them")
    if tokens < 2:
        raise ValueError(f"--tokens is {tokens}; expected at least 2")
    from temper_lab.ranks import parse_rank
    from temper_lab.theory import study, with_neighbours
    from temper_lab.theory.texts import open_network, rows_of_text

    wanted = None if rank is None else parse_rank(rank)
    _check_targets(plot, json_file)
    from temper_lab.progress import Bar

    network, tokenizer = open_network(model)
    other = with_neighbours(network, to, wanted) if against is None else open_network(against)[0]
    ids, targets, source = rows_of_text(model, network, tokenizer, tokens, text, corpus)
    with Bar("sites", len(network.sites())) as bar:
        found = study(network, other, ids, targets, progress=bar.update)
    report = {"model": str(model), "against": against and str(against), "text": source, **found}
    is_new = json_file is not None and not json_file.exists()
    if json_file is not None:
        from temper_lab.io import atomic_write, dumps

        atomic_write(json_file, dumps(json_file.name, report))
    if plot is not None:
        from temper_lab.figures.theory import draw

        try:
            draw(report, plot)
        except OSError:
            # Both or neither.
            if json_file is not None and is_new:
                json_file.unlink(missing_ok=True)
            raise
    from temper_lab.progress import console
    from temper_lab.theory.show import show

    show(report, console(160))
    print(f"text: {source}")
    for name, path in (("json", json_file), ("figure", plot)):
        if path is not None:
            print(f"{name}: {path}")
    for line in report["exceeded"]:
        print(f"error: bound exceeded at {line}", file=sys.stderr)
    return 1 if report["exceeded"] else 0


def _check_targets(plot: Path | None, json_file: Path | None) -> None:
    """Before anything is computed that could not be written in the end."""
    if plot is not None:
        from temper_lab.figures import check_target

        check_target(plot)
    if json_file is not None and json_file.is_dir():
        raise ValueError(f"cannot write JSON to {json_file}: it is a folder")
