"""`temper inspect`: what the routing of a model does with a text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

if TYPE_CHECKING:
    from temper_lab.report.explorer import Trace


def inspect(
    run: tyro.conf.UseAppendAction[list[Path]],
    text: tyro.conf.UseAppendAction[list[str]] = [],  # noqa: B006 - tyro shows it in --help
    out: Path | None = None,
    as_json: Annotated[str | None, tyro.conf.arg(name="json", metavar="FILE|-")] = None,
    live_megabytes: float = 64.0,
) -> None:
    """See how every token's streams are read, mixed and written, as a page, a table or JSON.

        temper inspect --run runs/smoke
        temper inspect --run runs/smoke --text "The people of the United States" --out people.html
        temper inspect --run runs/cp --run runs/tucker --text "A text" --text "Another"
        temper inspect --run runs/smoke --text "The people" --json - | jq '.models[0].traces[0].sites[0].pre'

    The page is one file that works without a network. It runs the model itself, so that texts can be typed there.

    Args:
        run: The folder of a run, or a model folder. Give it again to have several models in one page.
        text: A text to look at; give it again for more. Without one, passages of the run's validation documents.
        out: The page to write; inspect.html, or none at all if only JSON is asked for.
        as_json: Also write every number to this file; "-" prints it instead of the table.
        live_megabytes: The most that models may take in the page; one that does not fit shows these texts only.
    """
    if not run:
        raise ValueError("--run is missing; expected the folder of a run, or a model folder")
    if live_megabytes < 0:
        raise ValueError(f"--live-megabytes is {live_megabytes}; expected 0 or more")
    if out is not None and out.is_dir():
        raise ValueError(f"--out is the folder {out}; expected the name of a file")
    from temper_lab.io import atomic_write, dumps
    from temper_lab.report.explorer import Subject, build
    from temper_lab.report.page import page

    titles = _titles(run)
    subjects = [Subject(path, title) for path, title in zip(run, titles, strict=True)]
    tab, traces = build(subjects, text, live_megabytes=live_megabytes)
    out = Path("inspect.html") if out is None and as_json is None else out
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(out, page(f"Routing of {', '.join(titles)}", [tab]))
    if as_json is not None:
        models = [
            {"model": str(path), "traces": [each.to_dict() for each in own]}
            for path, own in zip(run, traces, strict=True)
        ]
        content = dumps("the traces", {"format": "temper-inspect-1", "models": models})
        if as_json == "-":
            print(content, end="")
        else:
            Path(as_json).parent.mkdir(parents=True, exist_ok=True)
            atomic_write(Path(as_json), content)
    if as_json != "-":
        for title, own in zip(titles, traces, strict=True):
            _print_table(title, own)
    if out is not None:
        print(f"page: {out}", file=sys.stderr if as_json == "-" else sys.stdout)


def _titles(paths: list[Path]) -> list[str]:
    """The names of the folders, or where they are alike the whole paths."""
    names = [
        path.resolve().parent.name if path.resolve().name in ("model", "best") else path.resolve().name
        for path in paths
    ]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]


def _print_table(title: str, traces: list[Trace]) -> None:
    from rich.table import Table

    from temper_lab.progress import console
    from temper_lab.report.explorer.trace import summary

    tokens = sum(len(each.ids) for each in traces)
    bits = [value for each in traces for value in each.surprise if value is not None]
    mean = f", {sum(bits) / len(bits):.3f} bits a token" if bits else ""
    texts = "1 text" if len(traces) == 1 else f"{len(traces)} texts"
    columns = ("site", "mean pre", "mean post", "row error", "column error", "composite gain", "similarity")
    table = Table(*columns, box=None)
    for row in summary(traces):
        table.add_row(row["name"], *_cells(row))
    out = console(240)
    out.print(f"{title}: {tokens:,} tokens in {texts}{mean}", highlight=False)
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
