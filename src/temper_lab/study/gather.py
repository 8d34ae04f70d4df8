"""The results of a study: gathered from the folders of its runs, and taken over from other results."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from temper_lab.data import DataFingerprint
from temper_lab.data.reader import ORDER_VERSION
from temper_lab.io import entry as checked_entry
from temper_lab.io import read_json
from temper_lab.recipe import Recipe
from temper_lab.study import environment, vary
from temper_lab.study.claims import Claim, Record
from temper_lab.study.cost import counts_of, flops_of
from temper_lab.study.grid import Cell, run_folder
from temper_lab.study.results import (
    FILE_NAME,
    ROUTING,
    STATUSES,
    CoreScores,
    Cost,
    Final,
    Results,
    Routing,
    Run,
    Source,
    Status,
    Timing,
    Training,
    Validation,
    number,
)
from temper_lab.study.runner import Entry
from temper_lab.study.spec import FILE_NAME as STUDY
from temper_lab.study.spec import Study
from temper_lab.study.vary import MACHINE, OWN
from temper_lab.train import run_dir
from temper_lab.train.run_dir import FILE_NAME as RUN

# The fraction of the steps, at the end, over which the training loss is averaged.
END = 0.1
# The file with a run's CORE scores, in its folder.
CORE_FILE = "core.json"

Rows = list[dict[str, Any]]
# Entries by the key of their run.
KnownRuns = Mapping[str, Run]


def gather(
    study: Study,
    folder: Path,
    entries: Iterable[Entry],
    vocab_size: int,
    tokenizer: str | None = None,
    *,
    cost: Cost | None = None,
    known: KnownRuns,
) -> Results:
    """The results so far.

    Args:
        tokenizer: its fingerprint.
        known: the entries of runs that were taken over from other results.
    """
    runs = (known[entry.cell.key] if entry.is_known else _run(study, folder, entry, vocab_size) for entry in entries)
    return Results(
        runs=tuple(runs),
        study=study.name,
        command=" && ".join(study.commands),
        commit=environment.commit(),
        versions=environment.versions(),
        machine=environment.machine(),
        tokenizer=tokenizer,
        data=study.data,
        recipe=study.recipe.to_dict(),
        claims=study.claims,
        methods=tuple(map(str, study.methods)),
        streams=tuple(study.streams),
        seeds=tuple(study.seeds),
        vary=vary.plain(study.axes),
        cost=cost,
    )


def _run(study: Study, folder: Path, entry: Entry, vocab_size: int) -> Run:
    cell, run, train = entry.cell, run_folder(folder, entry.cell), study.settings_of(entry.cell).train
    rows = run_dir.read_log(run.metrics, "loss")
    step = rows[-1]["step"] if rows else 0
    validated = [row for row in rows if "val_bpb" in row]
    for row in validated:
        for name in ("val_bpb", "val_loss", *(name for name in ROUTING if name in row)):
            checked_entry(row, name, float, run.metrics)
    return Run(
        key=cell.key,
        preset=cell.method.preset,
        label=cell.method.label,
        streams=cell.num_streams,
        seed=cell.seed,
        status=cast("Status", entry.status if entry.status in STATUSES else "waiting"),
        method=str(cell.method),
        options=cell.method.options,
        vary=vary.plain(cell.vary),
        reason=entry.reason,
        parameters=counts_of(study, cell, vocab_size),
        flops_per_token=None if entry.status == "skipped" else flops_of(study, cell, vocab_size),
        step=step,
        steps=train.steps,
        tokens=step * train.batch_tokens,
        train=Training(_column(rows, "step"), _column(rows, "loss")),
        val=Validation(*(_column(validated, name) for name in ("step", "val_bpb", "val_loss"))),
        final=_final(rows, validated),
        routing=_routing(validated),
        core=read_core(run.path),
        timing=_timing(run_dir.read_log(run.path / "timing.jsonl", "seconds"), train.batch_tokens),
    )


def _column(rows: Rows, name: str) -> tuple[Any, ...]:
    return tuple(row[name] for row in rows)


def _final(rows: Rows, validated: Rows) -> Final | None:
    """The numbers at the end; None before the first validation."""
    if not validated:
        return None
    last = [row["loss"] for row in rows[-max(1, round(END * len(rows))) :]]
    return Final(statistics.fmean(last), validated[-1]["val_loss"], validated[-1]["val_bpb"])


def _routing(validated: Rows) -> Routing | None:
    """The mixing of streams, null where an earlier version did not measure it; None if nothing was measured."""
    rows = [row for row in validated if any(name in row for name in ROUTING)]
    columns = (tuple(row.get(name) for row in rows) for name in ROUTING)
    return Routing(_column(rows, "step"), *columns) if rows else None


def _timing(rows: Rows, batch_tokens: int) -> Timing | None:
    """The speed of the steps alone, without validations and interruptions."""
    if not rows:
        return None
    seconds = [row["seconds"] for row in rows]
    median = statistics.median(seconds)
    return Timing(median, batch_tokens / max(median, 1e-9), sum(seconds))


def read_known(study: Study, files: Sequence[Path]) -> dict[str, Run]:
    """The finished runs of other results.json that belong to a study, each with its source; earlier files win.

    A file of another recipe is a ValueError that lists the changed fields.
    """
    found: dict[str, Run] = {}
    for path in files:
        results = Results.read(path)
        _check_recipe(study, results, path)
        mine = _matching(study, results, path)
        new = {key: run for key, run in mine.items() if key not in found}
        print(f"{len(new)} of {len(results.runs)} runs taken over from {path}", file=sys.stderr)
        found |= new
    return found


def read_taken(study: Study, folder: Path) -> dict[str, Run]:
    """The runs that an earlier command took over into a study, from the study's own results.json."""
    path = folder / FILE_NAME
    if not path.is_file():
        return {}
    try:
        results = Results.read(path)
        taken = {run.key for run in results.runs if run.source is not None}
        return {key: run for key, run in _matching(study, results, path).items() if key in taken}
    # Damaged results are rebuilt from the runs in the folder.
    except ValueError:
        return {}


def is_finished(folder: Path | None, cell: Cell, known: KnownRuns) -> bool:
    """True if a run needs no training, because it has finished or its numbers are known."""
    if cell.key in known:
        return True
    if folder is None:
        return False
    run = run_folder(folder, cell)
    return run.is_run and run.read().get("status") == "finished"


def check_tokenizer(known: KnownRuns, fingerprint: str | None) -> None:
    """Raises ValueError if runs that are taken over had another tokenizer, as far as their results say."""
    for key, run in known.items():
        source = run.source or Source()
        if None not in (source.tokenizer, fingerprint) and source.tokenizer != fingerprint:
            raise ValueError(
                f"run {key} of the study {source.study!r} had another tokenizer, so it cannot join this one; expected "
                "results of the same corpus"
            )


def with_data(study: Study, folder: Path | None, files: Sequence[Path], here: DataFingerprint | None) -> Study:
    """The study with the data of its runs; ValueError if runs that it has or takes over were trained on other data.

    Args:
        files: results.json whose runs are taken over.
        here: the data of the runs to be trained; None if there are none.
    """
    own = [] if folder is None else _own_data(study, folder)
    others = [(path, Results.read(path).data) for path in files]
    found = here or next((data for _, data in [*own, *others] if data), None)
    for path, data in [*own, *others]:
        instead = "start anew with another --out" if (path, data) in own else "leave the file out"
        if data is None:
            # With nothing to join them, results of earlier versions stay as they are.
            if here or files:
                kept = folder / STUDY if folder and (path, data) in own and (folder / STUDY).is_file() else path
                record = json.dumps((found or DataFingerprint("..", None, ORDER_VERSION)).to_dict())
                raise ValueError(
                    f"{path} does not record the data that its runs were trained on, so they cannot be compared with "
                    f'others. If you know that they are these, write "data": {record} into {kept}; otherwise {instead}'
                )
        elif found and (changes := data.changes(found)):
            raise ValueError(
                f"{path} holds runs of other data, which cannot be compared with these: {'; '.join(changes)}. Restore "
                f"the data, or the version of temper that it was made with, or {instead}"
            )
    return replace(study, data=found)


def _own_data(study: Study, folder: Path) -> list[tuple[Path, DataFingerprint | None]]:
    """The files of a study's folder that say, or ought to, what its runs were trained on."""
    runs = [run for cell in study.cells if (run := run_folder(folder, cell)).is_run]
    if study.data:
        # That also stands for runs from before they recorded their data themselves.
        return [(folder / STUDY, study.data), *((run.path / RUN, data) for run in runs if (data := run.data()))]
    taken = [(folder / FILE_NAME, Results.read(folder).data)] if read_taken(study, folder) else []
    return [*taken, *((run.path / RUN, run.data()) for run in runs)]


def with_records(study: Study, files: Sequence[Path]) -> Study:
    """The study with claims dated as they were in the files, where they are the same claims."""
    records: dict[Claim, Record | None] = {}
    for path in files:
        for claim in Results.read(path).claims:
            records.setdefault(claim.statement, claim.record)
    claims = (replace(claim, record=claim.record or records.get(claim.statement)) for claim in study.claims)
    return replace(study, claims=tuple(claims))


def _check_recipe(study: Study, results: Results, path: Path) -> None:
    if not results.recipe:
        raise ValueError(f"{path} has no recipe; expected that of the study whose results it holds")
    before = Recipe.from_dict(results.recipe, str(path))
    if changes := before.changes(study.recipe, (*MACHINE, *OWN)):
        raise ValueError(f"{path} holds results of another recipe, which cannot join this study: {'; '.join(changes)}")


def _matching(study: Study, results: Results, path: Path) -> dict[str, Run]:
    """The finished runs that are in the grid, in its order."""
    runs = {run.key: run for run in results.runs}
    source = Source(results.study, results.commit, results.versions, results.machine, results.tokenizer)
    found = {}
    for cell in study.cells:
        run = runs.get(cell.key)
        if run is None or study.refusal(cell) is not None:
            continue
        steps = study.settings_of(cell).train.steps
        if not run.is_finished or run.bpb is None or (run.step, run.steps) != (steps, steps):
            continue
        here = (str(cell.method), cell.num_streams, cell.seed, tuple(sorted(cell.vary)))
        if (run.method, run.streams, run.seed, run.settings) != here:
            raise ValueError(f"{path}: run {cell.key} is not of {cell}; expected what its key says")
        # The total also depends on the tokenizer, which may not exist yet.
        added = counts_of(study, cell, study.recipe.model.vocab_size).added
        if run.added != added:
            raise ValueError(f"{path}: run {cell.key} has {run.added} routing parameters, here it would have {added}")
        found[cell.key] = replace(run, source=run.source or source)
    return found


def read_core(run: Path) -> CoreScores | None:
    """CORE and the accuracies of a run that was evaluated, else None."""
    path = run / CORE_FILE
    if not path.is_file():
        return None
    content = read_json(path)
    tasks = checked_entry(content, "tasks", dict, path)
    return CoreScores(number(content.get("CORE")), content.get("max_per_task"), tasks)
