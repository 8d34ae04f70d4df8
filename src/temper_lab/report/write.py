"""Writes the page of a study, its figures and its tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from temper_lab.io import atomic_write
from temper_lab.progress import Bar
from temper_lab.report import draw, tabs
from temper_lab.report.compute import Content, compute
from temper_lab.report.formats import as_csv, as_latex, as_markdown
from temper_lab.report.page import Tab, page

# Charts that not every study has: those of an earlier report are removed.
SOMETIMES = ("curves", "gaps", "loss", "mixing-*", "pareto-*", "parameters", "sweep-*", "cost", "forest-*", "claims*")


@dataclass(frozen=True)
class Report:
    """What was written."""

    page: Path
    figures: tuple[Path, ...]
    tables: tuple[Path, ...]
    content: Content


def write_report(results: Mapping[str, Any], out: Path, extra_tabs: Sequence[Tab] = ()) -> Report:
    """`report.html`, `figures/` and `tables/` in a folder, from the content of a results.json alone.

    Args:
        extra_tabs: shown before the last.
    """
    content = compute(results)
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; expected a folder for the report")
    html = page(
        f"{content.study.name}: hyper-connections compared",
        [*(tab for make in tabs.TABS if (tab := make(content)) is not None), *extra_tabs, tabs.about(content)],
    )
    for name in ("figures", "tables"):
        (out / name).mkdir(parents=True, exist_ok=True)
    figures = _figures(content, out / "figures")
    written = _tables(content, out / "tables")
    # The page last: when it is there, so is the rest.
    atomic_write(out / "report.html", html)
    return Report(out / "report.html", tuple(figures), tuple(written), content)


def _figures(content: Content, folder: Path) -> list[Path]:
    written: list[Path] = []
    with Bar("figures", len(content.charts)) as bar:
        for done, chart in enumerate(content.charts.values()):
            bar.update(done, chart.name)
            written += draw.draw(chart, folder)
    stale = {path for name in SOMETIMES for suffix in draw.SUFFIXES for path in folder.glob(f"{name}{suffix}")}
    for path in stale - set(written):
        path.unlink()
    return written


def _tables(content: Content, folder: Path) -> list[Path]:
    written = []
    for table in content.tables.values():
        texts = {".csv": as_csv(table)}
        if table.columns:
            texts |= {".tex": as_latex(table), ".md": as_markdown(table)}
        for suffix, text in texts.items():
            path = folder / f"{table.name}{suffix}"
            atomic_write(path, text)
            written.append(path)
    sometimes = ("cost", "core", "claims", "claim-tests")
    for path in (folder / f"{name}{suffix}" for name in sometimes for suffix in (".csv", ".tex", ".md")):
        if path not in written:
            path.unlink(missing_ok=True)
    return written
