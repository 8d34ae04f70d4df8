"""`temper report` and `temper inspect`: commands that write a page."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from temper_lab.cli import UsageError

if TYPE_CHECKING:
    from temper_lab.explorer import Trace
    from temper_lab.report.page import Tab
    from temper_lab.study.results import Results


def report(
    study: Annotated[Path, tyro.conf.Positional],
    out: Path | None = None,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
    live_megabytes: float = 1.5,
) -> None:
    """Turn a study's results.json into a page of tables, curves, claims, parameters, cost and significance.

        temper report runs/demo
        temper report runs/demo/results.json --out reports/demo
        temper report runs/demo --json
        temper report runs/demo --live-megabytes 24

    `report.html` is a single file that needs no network. Beside it are figures/ (PNG and SVG) and
    tables/ (CSV, LaTeX and Markdown). A running study gives a report of the runs that have finished.

    Args:
        study: The folder of a study, as written by `temper compare`, or a results.json.
        out: Write to this folder instead of the study's own.
        as_json: Print the tables and statements as JSON instead of the main table.
        live_megabytes: The most space that models may take in the page, where texts can then be typed; a model that
            does not fit shows traced texts only.
    """
    if not live_megabytes >= 0:
        raise ValueError(f"--live-megabytes is {live_megabytes}; expected 0 or more")
    from temper_lab.report.write import write_report
    from temper_lab.study.results import Results

    results = Results.read(study)
    folder = study if study.is_dir() else study.parent
    target = folder if out is None else out
    done = write_report(results, target, _explorer(folder, results, live_megabytes))
    if as_json:
        print(json.dumps(done.content.to_dict(), indent=2, allow_nan=False))
        return
    from temper_lab.console import console, visible
    from temper_lab.report.outcomes import claim_lines
    from temper_lab.report.table import as_rich
    from temper_lab.report.tables import SCALE

    console(240).print(as_rich(done.content.tables["main"]))
    for line in (*done.content.lines, SCALE, *claim_lines(done.content.claims)):
        print(visible(line))
    print(f"page: {done.page}")
    print(
        f"beside it: {len(done.figures)} files in {target / 'figures'}, {len(done.tables)} files in {target / 'tables'}"
    )


def _explorer(folder: Path, results: Results, live_megabytes: float) -> list[Tab]:
    """The routing explorer, if the study's models are still there."""
    from temper_lab.explorer import tab

    found = tab(folder, results, live_megabytes=live_megabytes)
    return [] if found is None else [found]


def inspect(
    run: tyro.conf.UseAppendAction[list[Path]],
    text: tyro.conf.UseAppendAction[list[str]] = [],  # noqa: B006 - tyro shows it in --help
    out: Path | None = None,
    as_json: Annotated[str | None, tyro.conf.arg(name="json", metavar="FILE|-")] = None,
    live_megabytes: float = 64.0,
) -> None:
    """Show how every token's streams are read, mixed and written, as a page, a table or JSON.

        temper inspect --run runs/smoke
        temper inspect --run runs/smoke --text "The people of the United States" --out people.html
        temper inspect --run runs/cp --run runs/tucker --text "A text" --text "Another"
        temper inspect --run runs/smoke --text "The people" --json - | jq '.models[0].traces[0].sites[0].pre'

    The page is one file that works without a network. It runs the model itself, so you can type a text there.

    Args:
        run: The folder of a run, or a model folder. Repeat the option to have several models in one page.
        text: A text to trace; repeat the option for more. By default, passages of the run's validation documents.
        out: The page to write; by default inspect.html, or no page if --json is given.
        as_json: Also write every number to this file; "-" prints it instead of the table.
        live_megabytes: The most space that models may take in the page; one that does not fit shows these texts only.
    """
    if not run:
        raise UsageError("--run is missing; expected the folder of a run, or a model folder")
    if not live_megabytes >= 0:
        raise ValueError(f"--live-megabytes is {live_megabytes}; expected 0 or more")
    if out is not None and out.is_dir():
        raise ValueError(f"--out is the folder {out}; expected the name of a file")
    from temper_lab.explorer import Subject, build
    from temper_lab.io import atomic_files, dumps
    from temper_lab.report.page import page

    titles = _titles(run)
    subjects = [Subject(path, title) for path, title in zip(run, titles, strict=True)]
    tab, traces = build(subjects, text, live_megabytes=live_megabytes)
    out = Path("inspect.html") if out is None and as_json is None else out
    content = None
    if as_json is not None:
        models = [
            {"model": str(path), "method": own[0].method, "traces": [each.to_dict() for each in own]}
            for path, own in zip(run, traces, strict=True)
        ]
        content = dumps("the traces", {"format": "temper-inspect-1", "models": models})
    html = None if out is None else page(f"Routing of {', '.join(titles)}", [tab])
    targets = ((out, html), (None if as_json in (None, "-") else Path(as_json), content))
    texts = {path: text for path, text in targets if path is not None and text is not None}
    with atomic_files(*texts) as parts:
        for part, each in zip(parts, texts.values(), strict=True):
            part.write_text(each, encoding="utf-8")
    if as_json == "-":
        print(content, end="")
    if as_json != "-":
        for title, own in zip(titles, traces, strict=True):
            _print_table(title, own)
    if out is not None:
        print(f"page: {out}", file=sys.stderr if as_json == "-" else sys.stdout)


def _titles(paths: list[Path]) -> list[str]:
    """The names of the folders, or their full paths where names are equal."""
    names = [
        path.resolve().parent.name if path.resolve().name in ("model", "best") else path.resolve().name
        for path in paths
    ]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]


def _print_table(title: str, traces: list[Trace]) -> None:
    from rich.table import Table
    from rich.text import Text

    from temper_lab.console import console, visible
    from temper_lab.explorer.trace import summary

    tokens = sum(len(each.ids) for each in traces)
    bits = [value for each in traces for value in each.surprise if value is not None]
    mean = f", {sum(bits) / len(bits):.3f} bits a token" if bits else ""
    texts = "1 text" if len(traces) == 1 else f"{len(traces)} texts"
    columns = ("site", "mean pre", "mean post", "row error", "column error", "composite gain", "similarity")
    table = Table(*columns, box=None)
    for row in summary(traces):
        table.add_row(row["name"], *_cells(row))
    out = console(240)
    out.print(Text(visible(f"{title} ({traces[0].method}): {tokens:,} tokens in {texts}{mean}")))
    if any(each.is_cut for each in traces):
        out.print("a text is longer than the model's context: only its beginning was read")
    if traces[0].sites[0].routing.pre.shape[-1] == 1:
        out.print("one stream, no routing: every site is x + f(x)")
        return
    out.print(table)


def _cells(row: dict[str, Any]) -> list[str]:
    weights = [" ".join(f"{value:.2f}" for value in row[head]) for head in ("pre", "post")]
    errors = [f"{row[name]:.1e}" for name in ("row_error", "column_error")]
    gains = f"{row['composite_forward_gain']:.3f} / {row['composite_backward_gain']:.3f}"
    return [*weights, *errors, gains, f"{row['stream_similarity']:.3f}"]
