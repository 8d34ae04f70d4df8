"""Tables as CSV, LaTeX, Markdown and HTML, and for the terminal."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table as RichTable

Row = Mapping[str, Any]
DASH = "\N{EN DASH}"
# Longer texts are wrapped.
WIDE = 40

LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "_": r"\_",
    "%": r"\%",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "±": r"$\pm$",
    "\N{MULTIPLICATION SIGN}": r"$\times$",
    DASH: "--",
}


@dataclass(frozen=True)
class Column:
    """A column of a table, as it is displayed.

    Args:
        show: the text of a cell.
        sort: the entry that rows are sorted by when the heading is clicked.
        is_strong: cells that stand out.
        is_text: aligned to the left.
    """

    title: str
    show: Callable[[Row], str]
    sort: str
    is_strong: Callable[[Row], bool] = field(default=lambda row: False)
    is_text: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of plain values, all with the same entries, and the columns to display.

    Without columns it is only written as CSV, for programs.

    Args:
        group: the entries at whose change a line is drawn.
    """

    name: str
    title: str
    rows: tuple[Row, ...]
    columns: tuple[Column, ...] = ()
    note: str = ""
    group: tuple[str, ...] = ()


def as_csv(table: Table) -> str:
    """All entries in full precision; missing ones are empty."""
    out = io.StringIO()
    names = list(table.rows[0]) if table.rows else [column.sort for column in table.columns]
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(table.rows)
    return out.getvalue()


def as_latex(table: Table) -> str:
    """A table for papers; needs the package booktabs."""
    align = "".join("l" if column.is_text else "r" for column in table.columns)
    lines = [
        "% needs \\usepackage{booktabs}",
        "\\begin{table}",
        "\\centering",
        f"\\caption{{{latex(' '.join((table.title + '.', table.note)).strip())}}}",
        f"\\begin{{tabular}}{{{align}}}",
        "\\toprule",
        " & ".join(latex(column.title) for column in table.columns) + r" \\",
        "\\midrule",
    ]
    for row, is_new in zip(table.rows, _news(table), strict=True):
        if is_new:
            lines.append("\\midrule")
        cells = []
        for column in table.columns:
            text = latex(column.show(row))
            cells.append(f"\\textbf{{{text}}}" if column.is_strong(row) else text)
        lines.append(" & ".join(cells) + r" \\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", "\\end{table}", ""])


def latex(text: str) -> str:
    """Escapes text for LaTeX."""
    return "".join(LATEX.get(character, character) for character in " ".join(text.split()))


def as_markdown(table: Table) -> str:
    """A table for a README, with its note below."""
    lines = [[_markdown(column.title) for column in table.columns]]
    lines.append(["---" if column.is_text else "---:" for column in table.columns])
    for row in table.rows:
        texts = ((_markdown(column.show(row)), column.is_strong(row)) for column in table.columns)
        lines.append([f"**{text}**" if is_strong else text for text, is_strong in texts])
    body = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f"{body}\n\n{table.note}\n" if table.note else f"{body}\n"


def _markdown(text: str) -> str:
    """Escapes text for a Markdown cell, on one line."""
    return re.sub(r"([\\|*_`<>\[\]])", r"\\\1", " ".join(text.split()))


def as_html(table: Table) -> str:
    """A table that scrolls in its own box and is sorted by a click on a heading."""
    if not table.rows:
        return ""
    heads = "".join(
        f'<th scope="col"{_side(column)}><button type="button">{escape(column.title)}</button></th>'
        for column in table.columns
    )
    body = "".join(
        f"<tr{first}>{''.join(_cell(column, row) for column in table.columns)}</tr>"
        for row, first in zip(table.rows, (' class="first"' if is_new else "" for is_new in _news(table)), strict=True)
    )
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return (
        f"<h2>{escape(table.title)}</h2>"
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.title)}">'
        f'<table class="sortable" data-table="{escape(table.name)}"><thead><tr>{heads}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>{note}"
    )


def as_rich(table: Table) -> RichTable:
    from rich.markup import escape
    from rich.table import Table as RichTable

    from temper_lab.console import visible

    def plain(text: str) -> str:
        return escape(visible(text))

    rich = RichTable(title=plain(table.title), title_justify="left")
    for column in table.columns:
        rich.add_column(plain(column.title), justify="left" if column.is_text else "right", no_wrap=True)
    for row, is_new in zip(table.rows, _news(table), strict=True):
        if is_new:
            rich.add_section()
        cells = []
        for column in table.columns:
            text = plain(column.show(row))
            cells.append(f"[bold]{text}[/bold]" if column.is_strong(row) else text)
        rich.add_row(*cells)
    return rich


def whole(value: float | None) -> str:
    if value is None:
        return DASH
    return f"{value:,}" if value < 10**10 else f"{value:.3e}"


def decimal(value: float | None, digits: int = 4, *, sign: bool = False) -> str:
    if value is None:
        return DASH
    return f"{value:{'+' if sign else ''}.{digits}f}"


def spread(centre: float | None, sd: float | None, digits: int = 4) -> str:
    """`2.0412 ± 0.0031`, or the mean alone."""
    return decimal(centre, digits) + (f" ± {sd:.{digits}f}" if sd is not None else "")


def percent(share: float | None) -> str:
    if share is None:
        return DASH
    return f"{share:.1%}" if share < 10 else f"{share:,.0f}\N{MULTIPLICATION SIGN}"


def _news(table: Table) -> list[bool]:
    """True if a row begins a new group, other than the first."""
    values = [[row.get(name) for name in table.group] for row in table.rows]
    return [place > 0 and value != values[place - 1] for place, value in enumerate(values)]


def _side(column: Column, text: str = "") -> str:
    if not column.is_text:
        return ""
    return ' class="text wide"' if len(text) > WIDE else ' class="text"'


def _cell(column: Column, row: Row) -> str:
    value = row.get(column.sort)
    sort = "" if value is None else f' data-sort="{escape(str(value))}"'
    text = column.show(row)
    inside = f"<strong>{escape(text)}</strong>" if column.is_strong(row) else escape(text)
    return f"<td{_side(column, text)}{sort}>{inside}</td>"
