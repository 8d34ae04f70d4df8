"""What a study would take, without doing any of it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from temper_lab import plan
from temper_lab.bench.run import pinned
from temper_lab.compare import vary
from temper_lab.compare.counts import counts_of, flops_of
from temper_lab.compare.run import check_folder, check_runs, vocab_size
from temper_lab.compare.session import Session
from temper_lab.compare.study import Cell, Study, run_folder
from temper_lab.progress import duration


def forecast(study: Study, folder: Path | None, session: Session) -> None:
    """Prints the grid with parameters and time."""
    from rich.table import Table

    from temper_lab.progress import console

    if folder is not None and folder.exists():
        check_folder(folder)
        check_runs(study, folder)
    plan.check_here(study.recipe)
    size = study.recipe.model.vocab_size if folder is None else vocab_size(study, folder)
    runs = [cell for cell in study.cells if not study.refusal(cell) and not _is_finished(folder, cell)]
    jobs, threads = session.settled(study.recipe, len(runs))
    with pinned(jobs * threads or torch.get_num_threads()):
        here = plan.matmul_flops(study.recipe) * (plan.GPU_SHARE if torch.cuda.is_available() else plan.CPU_SHARE)
    table = Table(box=None)
    table.add_column("method", no_wrap=True)
    fields = [name for name, _ in study.axes]
    for name in ("N", *map(vary.short, fields), "seeds", "added", "parameters", "FLOPs/token", "to train", "time"):
        table.add_column(name, justify="right", no_wrap=True)
    groups: dict[object, list[Cell]] = {}
    for cell in study.cells:
        groups.setdefault(cell.group, []).append(cell)
    total, notes = 0.0, []
    for cells in groups.values():
        first = cells[0]
        counts = counts_of(study, first, size)
        seeds = " ".join(str(cell.seed) for cell in cells)
        values = [vary.show_or_dash(study.value_of(first, name)) for name in fields]
        known = [str(first.method), str(first.streams), *values, seeds]
        known += [f"{counts['added']:,}", f"{counts['total']:,}"]
        if reason := study.refusal(first):
            notes.append(f"{_name(first)} is skipped: {reason}")
            table.add_row(*known, "-", "skipped", "-")
            continue
        flops, train = flops_of(study, first, size), study.settings_of(first).train
        open_runs = [cell for cell in cells if cell in runs]
        seconds = len(open_runs) * flops * train.steps * train.batch_tokens / here
        total += seconds
        table.add_row(*known, f"{flops:,}", f"{len(open_runs)} of {len(cells)}", duration(seconds))
        if counts["frozen"]:
            notes.append(f"{_name(first)}: {counts['frozen']:,} more are stored and not trained")
    console(160).print(table)
    for note in notes:
        print(note)
    trains = [study.settings_of(cell).train for cell in study.cells]
    steps, tokens = _each(train.steps for train in trains), _each(train.batch_tokens for train in trains)
    print(f"{steps} steps x {tokens} tokens each; corpus {study.recipe.data.corpus}")
    each = f" of {threads} thread{'s' if threads > 1 else ''}" if threads else ""
    print(
        f"{len(runs)} runs to train, {jobs} at a time{each}: about {duration(total)} on this machine (from its matmul "
        "speed)"
    )
    if study.claims:
        print(f"{len(study.claims)} claims to test: {', '.join(claim.name for claim in study.claims)}")
    if not torch.cuda.is_available() and study.recipe.data.shares > 1:
        gpus = study.recipe.data.shares
        there = total * here / (plan.A100_FLOPS * plan.GPU_SHARE * gpus)
        print(f"about {duration(there)} on {gpus} A100 (estimate: {plan.GPU_SHARE:.0%} of their bfloat16 matmuls)")


def _name(cell: Cell) -> str:
    return f"{cell.method}, N={cell.streams}{f', {vary.describe(cell.vary)}' if cell.vary else ''}"


def _each(numbers: Iterable[int]) -> str:
    return " or ".join(f"{number:,}" for number in sorted(set(numbers)))


def _is_finished(folder: Path | None, cell: Cell) -> bool:
    if folder is None:
        return False
    run = run_folder(folder, cell)
    return run.is_run and run.read().get("status") == "finished"
