"""`temper params`: counts the parameters that every method adds to a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

import temper
from temper.config import RouterConfig
from temper_lab.io import brief
from temper_lab.method import Method, parse_all, parse_rank, show_rank

if TYPE_CHECKING:
    from rich.table import Table

# {method: {N: {"per_site", "total"}}}
Counts = dict[str, dict[str, dict[str, int] | None]]
MAX_SITES, MAX_SIZE = 1_000_000, 1 << 24


def params(
    streams: Annotated[list[int], tyro.conf.arg(metavar="N")] = [2, 4, 8, 16],  # noqa: B006 - tyro shows it in --help
    dim: int = 768,
    sites: int = 24,
    methods: Annotated[list[str], tyro.conf.arg(metavar="METHOD")] = [],  # noqa: B006
    ranks: Annotated[list[str], tyro.conf.arg(metavar="R|AxB")] = [],  # noqa: B006
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
    plot: Path | None = None,
) -> None:
    """Count the parameters that every method adds, without allocating them.

    The output is a table, JSON or a figure:

        temper params
        temper params --streams 4 8 --json
        temper params --methods mhc mhc:generator=cp:mixer=kronecker:rank=2
        temper params --ranks 2 8 32 2x12 2x48
        temper params --plot parameters.png

    Args:
        streams: Numbers of residual streams N.
        dim: Width D of each stream.
        sites: Hyper-connections in the model; a transformer has two per block.
        methods: Presets, or presets with overrides, to count; by default all presets.
        ranks: Further ranks to count: R stands for temper-cp:rank=R, AxB for temper-tucker:rank=AxB (streams A,
            features B).
        as_json: Print JSON: per site and in total, by method and N.
        plot: Write the figure of parameters per connection against N to this .png, .svg or .pdf file.
    """
    if not streams:
        raise ValueError("--streams is empty; expected at least one number")
    if not 1 <= sites <= MAX_SITES:
        raise ValueError(f"--sites is {brief(sites)}; expected 1 to {MAX_SITES:,}")
    for name, values in (("streams", streams), ("dim", [dim])):
        if strange := [value for value in values if not 1 <= value <= MAX_SIZE]:
            raise ValueError(f"--{name} has {brief(strange[0])}; expected 1 to {MAX_SIZE:,}")
    asked = parse_all(methods) if methods else tuple(map(Method, temper.PRESETS))
    asked = tuple(dict.fromkeys([*asked, *map(_ranked, ranks)]))
    counts = count_all(asked, streams, dim, sites)
    if plot is not None:
        from temper_lab.report.plots_mpl import draw_to
        from temper_lab.report.sweeps import parameters_per_site

        per_site = {name: {int(n): row["per_site"] for n, row in rows.items() if row} for name, rows in counts.items()}
        draw_to(parameters_per_site(per_site, dim), plot)
    if as_json:
        print(json.dumps(counts, indent=2))
        return
    _print_table(asked, counts, streams, dim, sites)
    if plot is not None:
        print(f"figure: {plot}")


def count_all(methods: Sequence[Method], streams: Sequence[int], dim: int, sites: int) -> Counts:
    """The counts of every method; None where a method does not fit an N."""
    counts: Counts = {}
    for method in methods:
        rows: dict[str, dict[str, int] | None] = {}
        for n in streams:
            try:
                rows[str(n)] = _row(method.config(n, dim), sites)
            # A rank may be too large for some N. An unknown name fits none, and is an error below.
            except ValueError as error:
                rows[str(n)], reason = None, error
        if not any(rows.values()):
            raise ValueError(
                f"{method} fits none of N = {', '.join(map(str, streams))} at D = {dim}: {reason}"
            ) from reason
        counts[str(method)] = rows
    return counts


def _row(config: RouterConfig, sites: int) -> dict[str, int]:
    trained = temper.count_parameters(config)
    row = {"per_site": trained, "total": sites * trained}
    stored = temper.count_parameters(config, include_frozen=True)
    # A frozen core is saved but not trained, so both numbers are given where they differ.
    return row if stored == trained else {**row, "stored_per_site": stored, "stored_total": sites * stored}


def _ranked(text: str) -> Method:
    """The method that a bare rank stands for."""
    rank = parse_rank(text)
    if isinstance(rank, float) or (isinstance(rank, tuple) and len(rank) != 2):
        raise ValueError(f"rank {text!r} is neither a CP rank like 8 nor a Tucker rank like 2x12")
    return Method.parse(f"temper-{'tucker' if isinstance(rank, tuple) else 'cp'}:rank={show_rank(rank)}")


def _print_table(methods: Sequence[Method], counts: Counts, streams: list[int], dim: int, sites: int) -> None:
    from rich.console import Console

    console = Console()
    # The columns before the counts, of which those of one N take at most 40 characters.
    names = 40 + max(len(str(method)) for method in methods)
    # A piped table may be of any width; in a terminal it is split by N to fit.
    fitting = max(1, (console.width - names) // 40) if console.is_terminal else len(streams)
    if not console.is_terminal:
        console = Console(width=names + 40 * len(streams))
    for start in range(0, len(streams), fitting):
        console.print(_table(methods, counts, streams[start : start + fitting], dim, sites))
    for label, rows in counts.items():
        for n, row in rows.items():
            if row and "stored_per_site" in row:
                print(f"{label}, N={n}: {row['stored_per_site']:,} per site with its frozen core")


def _table(methods: Sequence[Method], counts: Counts, streams: list[int], dim: int, sites: int) -> Table:
    from rich.table import Table

    table = Table(title=f"Parameters added by a hyper-connection (D = {dim}, {sites} sites)", title_justify="left")
    for name in ("method", "generator", "mixer"):
        table.add_column(name, no_wrap=True)
    for n in streams:
        for name in (f"N={n}\nper site", f"{sites} sites", "of mhc"):
            table.add_column(name, justify="right", no_wrap=True)
    mhc = {n: sites * temper.count_parameters(Method("mhc").config(n, dim)) for n in streams}
    for method in methods:
        rows = counts[str(method)]
        config = next(method.config(n, dim) for n in (*streams, *map(int, rows)) if rows[str(n)])
        heads = {getattr(config, head).name for head in config.heads}
        cells = [str(method), " + ".join(sorted(heads)) or "-", config.mixer.name if config.mixer else "-"]
        for n in streams:
            row = rows[str(n)]
            if row is None:
                cells += ["does not fit", "", ""]
                continue
            share = row["total"] / mhc[n] if mhc[n] else None
            cells += [_number(row["per_site"]), _number(row["total"]), _share(share)]
        table.add_row(*cells)
    return table


def _number(value: int) -> str:
    return f"{value:,}" if value < 10**10 else f"{value:.3e}"


def _share(share: float | None) -> str:
    if share is None:
        return "-"
    return f"{share:.1%}" if share < 10 else f"{share:.3g}x"
