"""`temper runs`: lists runs and their results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import tyro


def runs(
    folder: Annotated[Path, tyro.conf.Positional] = Path("."),
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """List the runs in a folder with their status and best bpb.

        temper runs
        temper runs experiments --json

    A run is running, finished, interrupted, failed or killed. Interrupted and killed runs can be resumed.

    Args:
        folder: The folder to search, including the folders below it.
        as_json: Print JSON.
    """
    from temper_lab.train.run_dir import find, summary

    lines = [summary(path) for path in find(folder)]
    if as_json:
        print(json.dumps(lines, indent=2))
    elif not lines:
        print(f"no runs in {folder}")
    else:
        _print_table(lines)


def _print_table(lines: list[dict[str, Any]]) -> None:
    from rich.table import Table
    from rich.text import Text

    from temper_lab.console import console, visible

    columns = ("run", "status", "step", "best bpb", "method", "N", "recipe", "started")
    table = Table(*columns, box=None)
    for line in lines:
        best = "-" if line["best_bpb"] is None else f"{line['best_bpb']:.4f}"
        step = "-" if line["step"] is None else f"{line['step']:,}/{line['steps']:,}"
        rest = (str(line.get(key, "-")) for key in ("method", "num_streams", "recipe", "started"))
        # A name may look like rich markup, or hold control characters.
        table.add_row(*(Text(visible(cell)) for cell in (line["run"], line["status"], step, best, *rest)))
    console(240).print(table)
    for line in lines:
        if "error" in line:
            print(visible(f"{line['run']}: {line['error']}"))
