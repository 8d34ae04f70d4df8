"""`temper params`: what every method adds to a model, to the parameter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

import temper
from temper.config import RouterConfig
from temper_lab.io import brief

if TYPE_CHECKING:
    from rich.table import Table

MAX_SITES, MAX_SIZE = 1_000_000, 1 << 24


def params(
    streams: Annotated[list[int], tyro.conf.arg(metavar="N")] = [2, 4, 8, 16],  # noqa: B006 - tyro shows it in --help
    dim: int = 768,
    sites: int = 24,
    ranks: Annotated[list[str], tyro.conf.arg(metavar="R|AxB")] = [],  # noqa: B006
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
    plot: Path | None = None,
) -> None:
    """Count the parameters that every method adds, without allocating one.

    A table for people, JSON for programs, a figure for papers:

        temper params
        temper params --streams 4 8 --json
        temper params --ranks 2 8 32 2x12 2x48
        temper params --plot parameters.png

    Args:
        streams: Numbers of residual streams N.
        dim: Width D of each stream.
        sites: Hyper-connections in the model; a transformer has two per block.
        ranks: More ranks to count. R is a CP rank, AxB a Tucker rank (streams A, features B).
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
    counts = count_all(streams, dim, sites, ranks)
    if plot is not None:
        from temper_lab.figures.parameters import draw

        draw({name: {n: row["per_site"] for n, row in rows.items() if row} for name, rows in counts.items()}, dim, plot)
    if as_json:
        print(json.dumps(counts, indent=2))
        return
    _print_table(counts, streams, dim, sites)
    if plot is not None:
        print(f"figure: {plot}")


def count_all(
    streams: list[int], dim: int, sites: int, ranks: list[str]
) -> dict[str, dict[str, dict[str, int] | None]]:
    """{method: {N: {"per_site", "total"}}}; None where an explicit rank does not fit that N."""
    methods: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in temper.PRESETS}
    for rank in ranks:
        name, value = _parse_rank(rank)
        methods[f"{name}@{rank}"] = (name, {"rank": value})
    counts: dict[str, dict[str, dict[str, int] | None]] = {}
    for label, (name, overrides) in methods.items():
        rows: dict[str, dict[str, int] | None] = {}
        for n in streams:
            try:
                config = temper.preset(name, num_streams=n, dim=dim, **overrides)
            except ValueError:
                if not overrides:
                    raise
                rows[str(n)] = None
                continue
            rows[str(n)] = _row(config, sites)
        if not any(rows.values()):
            raise ValueError(f"rank {label.split('@')[1]} fits none of N = {', '.join(map(str, streams))} at D = {dim}")
        counts[label] = rows
    return counts


def _row(config: RouterConfig, sites: int) -> dict[str, int]:
    trained = temper.count_parameters(config)
    row = {"per_site": trained, "total": sites * trained}
    stored = temper.count_parameters(config, include_frozen=True)
    # A frozen core is saved but not added to what is trained: both numbers where they differ.
    return row if stored == trained else {**row, "stored_per_site": stored, "stored_total": sites * stored}


def _parse_rank(text: str) -> tuple[str, int | tuple[int, ...]]:
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.isdigit() for part in parts):
        raise ValueError(f"rank {text!r} is neither a CP rank like 8 nor a Tucker rank like 2x12")
    numbers = tuple(int(part) for part in parts)
    return ("temper-cp", numbers[0]) if len(numbers) == 1 else ("temper-tucker", numbers)


def _print_table(counts: dict[str, dict[str, dict[str, int] | None]], streams: list[int], dim: int, sites: int) -> None:
    from rich.console import Console

    console = Console()
    # A table that is piped into a file is as wide as it likes; in a terminal it is split by N to fit.
    fitting = max(1, (console.width - 60) // 40) if console.is_terminal else len(streams)
    if not console.is_terminal:
        console = Console(width=60 + 40 * len(streams))
    for start in range(0, len(streams), fitting):
        console.print(_table(counts, streams[start : start + fitting], dim, sites))
    for label, rows in counts.items():
        for n, row in rows.items():
            if row and "stored_per_site" in row:
                print(f"{label}, N={n}: {row['stored_per_site']:,} per site with its frozen core")


def _table(counts: dict[str, dict[str, dict[str, int] | None]], streams: list[int], dim: int, sites: int) -> Table:
    from rich.table import Table

    table = Table(title=f"Parameters added by a hyper-connection (D = {dim}, {sites} sites)", title_justify="left")
    for name in ("method", "generator", "mixer"):
        table.add_column(name, no_wrap=True)
    for n in streams:
        for name in (f"N={n}\nper site", f"{sites} sites", "of mhc"):
            table.add_column(name, justify="right", no_wrap=True)
    for label, rows in counts.items():
        config = temper.preset(label.split("@")[0], num_streams=streams[0], dim=dim)
        heads = {getattr(config, head).name for head in config.heads}
        cells = [label, " + ".join(sorted(heads)) or "-", config.mixer.name if config.mixer else "-"]
        for n in streams:
            row, mhc = rows[str(n)], counts["mhc"][str(n)]
            if row is None:
                cells += ["too large", "", ""]
                continue
            share = row["total"] / mhc["total"] if mhc and mhc["total"] else None
            cells += [_number(row["per_site"]), _number(row["total"]), _share(share)]
        table.add_row(*cells)
    return table


def _number(value: int) -> str:
    return f"{value:,}" if value < 10**10 else f"{value:.3e}"


def _share(share: float | None) -> str:
    if share is None:
        return "-"
    return f"{share:.1%}" if share < 10 else f"{share:.3g}x"
