"""`results.json`: everything that a study found, written whole."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from temper_lab import metrics
from temper_lab.compare import origin, vary
from temper_lab.compare.core import read_core
from temper_lab.compare.counts import counts_of, flops_of
from temper_lab.compare.runner import Entry
from temper_lab.compare.study import Study, run_folder
from temper_lab.io import atomic_write, dumps, read_json

FORMAT = "temper-results-1"
FILE_NAME = "results.json"
# The part of the steps, at the end, whose training losses are averaged.
END = 0.1
# What metrics.jsonl says of mixing, at every validation of a model with several streams.
ROUTING = ("res_off_diagonal", "composite_gain", "stream_similarity")
# Statuses that a reader has to know; a run in progress is waiting for its end.
STATUSES = ("finished", "failed", "skipped", "interrupted", "killed", "waiting")


def gather(study: Study, folder: Path, entries: Iterable[Entry], vocab_size: int, cost: Any) -> dict[str, Any]:
    """What there is so far."""
    return {
        "format": FORMAT,
        "study": study.name,
        "command": " && ".join(study.commands),
        "commit": origin.commit(),
        "versions": origin.versions(),
        "machine": origin.machine(),
        "recipe": study.recipe.to_dict(),
        "claims": [claim.to_dict() for claim in study.claims],
        "methods": [*map(str, study.methods)],
        "streams": study.streams,
        "seeds": study.seeds,
        "vary": vary.plain(study.axes),
        "runs": [_run(study, folder, entry, vocab_size) for entry in entries],
        "cost": cost,
    }


def write(folder: Path, results: Mapping[str, Any]) -> Path:
    path = folder / FILE_NAME
    atomic_write(path, dumps(FILE_NAME, results))
    return path


def read(folder: Path) -> dict[str, Any] | None:
    """What an earlier command has left; None if there is nothing, or nothing of ours."""
    try:
        content = read_json(folder / FILE_NAME)
    except ValueError:
        return None
    return content if content.get("format") == FORMAT else None


def known_cost(folder: Path) -> dict[str, Any] | None:
    """The cost that an earlier command has measured, if it is there in the form that this one writes."""
    cost = (read(folder) or {}).get("cost")
    rows = cost.get("rows") if isinstance(cost, dict) else None
    is_whole = isinstance(rows, list) and all(
        isinstance(row, dict) and {"method", "streams"} <= set(row) for row in rows
    )
    return cost if is_whole else None


def _run(study: Study, folder: Path, entry: Entry, vocab_size: int) -> dict[str, Any]:
    cell, run, train = entry.cell, run_folder(folder, entry.cell), study.settings_of(entry.cell).train
    rows = metrics.read(run.metrics)
    step = rows[-1]["step"] if rows else 0
    return {
        "key": cell.key,
        "method": str(cell.method),
        "preset": cell.method.preset,
        "options": cell.method.options,
        "label": cell.method.label,
        "streams": cell.streams,
        "seed": cell.seed,
        "vary": vary.plain(cell.vary),
        "status": entry.status if entry.status in STATUSES else "waiting",
        "reason": entry.reason,
        "parameters": counts_of(study, cell, vocab_size),
        "flops_per_token": None if entry.status == "skipped" else flops_of(study, cell, vocab_size),
        "step": step,
        "steps": train.steps,
        "tokens": step * train.batch_tokens,
        **_curves(rows),
        "core": read_core(run.path),
        "timing": _timing(metrics.read(run.path / "timing.jsonl"), train.batch_tokens),
    }


def _curves(rows: list[dict[str, Any]]) -> dict[str, Any]:
    validated = [row for row in rows if "val_bpb" in row]
    final = None
    if validated:
        last = [row["loss"] for row in rows[-max(1, round(END * len(rows))) :]]
        final = {
            "train_loss": statistics.fmean(last),
            "val_loss": validated[-1]["val_loss"],
            "bpb": validated[-1]["val_bpb"],
        }
    return {
        "train": {"step": [row["step"] for row in rows], "loss": [row["loss"] for row in rows]},
        "val": {
            "step": [row["step"] for row in validated],
            "bpb": [row["val_bpb"] for row in validated],
            "loss": [row["val_loss"] for row in validated],
        },
        "final": final,
        **_routing(validated),
    }


def _routing(validated: list[dict[str, Any]]) -> dict[str, Any]:
    """Nothing for a single stream, or for runs from before this was measured."""
    rows = [row for row in validated if all(name in row for name in ROUTING)]
    if not rows:
        return {}
    return {"routing": {name: [row[name] for row in rows] for name in ("step", *ROUTING)}}


def _timing(rows: list[dict[str, Any]], batch_tokens: int) -> dict[str, float] | None:
    """The steps alone: validations and the time between two sessions are nobody's speed."""
    if not rows:
        return None
    seconds = [row["seconds"] for row in rows]
    median = statistics.median(seconds)
    return {"step_seconds": median, "tokens_per_second": batch_tokens / median, "seconds": sum(seconds)}
