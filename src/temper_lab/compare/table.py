"""The closing table of a study, from its results alone."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from temper_lab.compare import vary

Results = Mapping[str, Any]


def rows(results: Results) -> list[dict[str, Any]]:
    """One row for every method, number of streams and combination of varied fields, over its finished seeds."""
    groups: dict[tuple[str, int, vary.Settings], list[dict[str, Any]]] = {}
    for run in results["runs"]:
        groups.setdefault((run["method"], run["streams"], _settings(run)), []).append(run)
    cost = {(row["method"], row["streams"]): row for row in (results["cost"] or {"rows": []})["rows"]}
    found = []
    for (method, streams, settings), runs in groups.items():
        done = [run for run in runs if _is_done(run)]
        finals = [run["final"]["bpb"] for run in done]
        residual = _finals(groups.get(("residual", 1, vary.of_residual(settings)), []))
        gaps = [run["final"]["bpb"] - residual[run["seed"]] for run in done if run["seed"] in residual]
        cores = [run["core"]["CORE"] for run in done if run["core"] and run["core"]["CORE"] is not None]
        found.append(
            {
                "method": method,
                "streams": streams,
                "vary": _values(results, runs[0]),
                "added": runs[0]["parameters"]["added"],
                "frozen": runs[0]["parameters"]["frozen"],
                "runs": (len(done), len(runs)),
                "first": _mean([run["val"]["bpb"][0] for run in done]),
                "final": _mean(finals),
                "sd": statistics.stdev(finals) if len(finals) > 1 else None,
                "gap": _mean(gaps),
                "core": _mean(cores),
                "cost": None if vary.has_own_step(settings) else cost.get((method, streams)),
                "status": next((run["status"] for run in runs if not _is_done(run)), "finished"),
            }
        )
    return found


def show(results: Results) -> None:
    """Prints the table."""
    from rich.table import Table

    from temper_lab.progress import console

    found = rows(results)
    columns = ["method", "N", *map(vary.short, results.get("vary", {}))]
    columns += ["added", "seeds", "first bpb", "final bpb", "to residual", "step"]
    has_core = any(row["core"] is not None for row in found)
    table = Table(*columns[:1], box=None)
    for name in [*columns[1:], *(["CORE"] if has_core else [])]:
        table.add_column(name, justify="right", no_wrap=True)
    for row in found:
        table.add_row(*_words(row), *([_number(row["core"])] if has_core else []))
    console(160).print(table)


def _settings(run: Mapping[str, Any]) -> vary.Settings:
    # Results of an older version have none.
    return vary.frozen(run.get("vary", {}))


def _values(results: Results, run: Mapping[str, Any]) -> dict[str, Any]:
    """The value of every varied field in a run."""
    recipe, settings = results["recipe"], run.get("vary", {})
    is_residual = run["preset"] == "residual"
    return {name: vary.value_in(recipe, settings, name, is_residual=is_residual) for name in results.get("vary", {})}


def _finals(runs: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """By seed."""
    return {run["seed"]: run["final"]["bpb"] for run in runs if _is_done(run)}


def _words(row: Mapping[str, Any]) -> Sequence[str]:
    done, asked = row["runs"]
    final = _number(row["final"]) if row["final"] is not None else row["status"]
    if row["sd"] is not None:
        final += f" ± {row['sd']:.4f}"
    cost = "-"
    if row["cost"] is not None:
        cost = f"{row['cost']['step_ms']['median']:,.0f} ms ({row['cost']['ratio']['median']:.2f}x)"
    return (
        row["method"],
        str(row["streams"]),
        *map(vary.show_or_dash, row["vary"].values()),
        f"{row['added']:,}",
        str(done) if done == asked else f"{done} of {asked}",
        _number(row["first"]),
        final,
        _number(row["gap"], "+.4f"),
        cost,
    )


def _is_done(run: Mapping[str, Any]) -> bool:
    return run["status"] == "finished" and run["final"] is not None


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _number(value: float | None, form: str = ".4f") -> str:
    return "-" if value is None else format(value, form)
