"""`temper report`: a study as a page, figures and tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

if TYPE_CHECKING:
    from temper_lab.report import Tab


def report(
    study: Annotated[Path, tyro.conf.Positional],
    out: Path | None = None,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Make the page of a study: tables, curves, claims, parameters, cost and significance, from its results.json alone.

        temper report runs/demo
        temper report runs/demo/results.json --out reports/demo
        temper report runs/demo --json

    `report.html` is one file to open, send or show: it needs no network. Beside it are figures/ (PNG and SVG) and
    tables/ (CSV, LaTeX and Markdown). A study that is still running has a report of what has finished.

    Args:
        study: The folder of a study, as `temper compare` makes it, or a results.json.
        out: Write to this folder instead of the study's own.
        as_json: Print the tables and statements as JSON instead of the main table.
    """
    from temper_lab.report import read, write_report

    results = read(study)
    folder = study if study.is_dir() else study.parent
    target = folder if out is None else out
    done = write_report(results, target, _explorer(folder, results))
    if as_json:
        print(json.dumps(done.content.to_dict(), indent=2, allow_nan=False))
        return
    from temper_lab.progress import console
    from temper_lab.report.formats import as_rich
    from temper_lab.report.outcomes import claim_lines
    from temper_lab.report.tables import SCALE

    console(240).print(as_rich(done.content.tables["main"]))
    for line in (*done.content.lines, SCALE, *claim_lines(done.content.claims)):
        print(line)
    print(f"page: {done.page}")
    print(
        f"beside it: {len(done.figures)} files in {target / 'figures'}, {len(done.tables)} files in {target / 'tables'}"
    )


def _explorer(folder: Path, results: dict[str, Any]) -> list[Tab]:
    """The routing explorer, where the study still has models."""
    from temper_lab.report.explorer import tab

    found = tab(folder, results)
    return [] if found is None else [found]
