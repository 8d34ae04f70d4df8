"""The closing table of a study, from its results alone."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Results = Mapping[str, Any]


def rows(results: Results) -> list[dict[str, Any]]:
    """One row for every method and number of streams, over its finished seeds."""
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for run in results["runs"]:
        groups.setdefault((run["method"], run["streams"]), []).append(run)
    residual = {run["seed"]: run["final"]["bpb"] for run in groups.get(("residual", 1), []) if _is_done(run)}
    cost = {(row["method"], row["streams"]): row for row in (results["cost"] or {"rows": []})["rows"]}
    found = []
    for (method, streams), runs in groups.items():
        done = [run for run in runs if _is_done(run)]
        finals = [run["final"]["bpb"] for run in done]
        gaps = [run["final"]["bpb"] - residual[run["seed"]] for run in done if run["seed"] in residual]
        cores = [run["core"]["CORE"] for run in done if run["core"] and run["core"]["CORE"] is not None]
        found.append(
            {
                "method": method,
                "streams": streams,
                "added": runs[0]["parameters"]["added"],
                "frozen": runs[0]["parameters"]["frozen"],
                "runs": (len(done), len(runs)),
                "first": _mean([run["val"]["bpb"][0] for run in done]),
                "final": _mean(finals),
                "sd": statistics.stdev(finals) if len(finals) > 1 else None,
                "gap": _mean(gaps),
                "core": _mean(cores),
                "cost": cost.get((method, streams)),
                "status": next((run["status"] for run in runs if not _is_done(run)), "finished"),
            }
        )
    return found


def show(results: Results) -> None:
    """Prints the table."""
    from rich.table import Table

    from temper_lab.progress import console

    found = rows(results)
    columns = ["method", "N", "added", "seeds", "first bpb", "final bpb", "to residual", "step"]
    has_core = any(row["core"] is not None for row in found)
    table = Table(*columns[:1], box=None)
    for name in [*columns[1:], *(["CORE"] if has_core else [])]:
        table.add_column(name, justify="right", no_wrap=True)
    for row in found:
        table.add_row(*_words(row), *([_number(row["core"])] if has_core else []))
    console(160).print(table)


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
