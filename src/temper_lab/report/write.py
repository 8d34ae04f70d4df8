"""Writes the page of a study, its figures and its tables, computed from results.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from temper_lab.console import Bar
from temper_lab.io import atomic_write
from temper_lab.report import charts as figures
from temper_lab.report import page as pages
from temper_lab.report import plots_mpl, sweeps, tables
from temper_lab.report.charts import Chart
from temper_lab.report.outcomes import claim_lines, claims_charts, claims_table, outcomes, tests_table
from temper_lab.report.page import Tab, page
from temper_lab.report.stats import NO_PAIR, ONE_SEED, VERDICTS, Comparison, baselines, compare, frontier
from temper_lab.report.sweeps import best_values
from temper_lab.report.table import Row, Table, as_csv, as_latex, as_markdown, percent, spread
from temper_lab.report.tables import core_lines, core_table, paper
from temper_lab.report.view import StudyView
from temper_lab.study.claims import Outcome
from temper_lab.study.results import Results


@dataclass(frozen=True)
class Content:
    """Tables, charts and sentences of a study, by name."""

    study: StudyView
    comparisons: tuple[Comparison, ...]
    tables: dict[str, Table]
    charts: dict[str, Chart]
    statements: dict[int, list[str]]
    claims: tuple[Outcome, ...] = ()

    @property
    def lines(self) -> list[str]:
        """The sentences, each with its N."""
        found = [f"N = {n}: {line}" for n, lines in self.statements.items() for line in lines]
        return found or ["No run has finished with a bpb yet, so there is nothing to compare."]

    def to_dict(self) -> dict[str, Any]:
        """The values that `temper report --json` prints."""
        rows = {name: [dict(row) for row in table.rows] for name, table in self.tables.items()}
        found = {"study": self.study.name, "statements": self.lines, "tables": rows}
        return found | ({"claims": claim_lines(self.claims)} if self.claims else {})


def compute(results: Results) -> Content:
    """Computes everything that a report shows, without writing."""
    study = StudyView.of(results)
    main, cost, core = tables.main_table(study), tables.cost_table(study), core_table(study)
    compared = {against: compare(study, against) for against in baselines(study)}
    comparisons = [one for rows in compared.values() for one in rows]
    # Figures and sentences show one setting, tables show all.
    others = [variant for variant in study.variants if variant.settings != study.settings]
    everywhere = comparisons + [one for there in others for base in baselines(there) for one in compare(there, base)]
    all_tables = [main, tables.significance_table(everywhere), cost, core]
    claims = outcomes(study)
    if claims:
        all_tables += [claims_table(claims), tests_table(claims)]
    all_tables += [tables.curves_table(study), tables.runs_table(study)]
    charts = [
        figures.curves(study),
        figures.gaps(study),
        figures.losses(study),
        *figures.mixing(study),
        figures.pareto(study, main),
        figures.pareto(study, main, "core"),
        sweeps.parameters(study),
        *sweeps.sweep_charts(study),
        figures.cost(study, cost),
        *(figures.forest(study, rows) for rows in compared.values()),
        *claims_charts(claims),
    ]
    said = statements(study, main, comparisons)
    for n, line in core_lines(core).items():
        said.setdefault(n, []).append(line)
    return Content(
        study,
        tuple(everywhere),
        {table.name: table for table in all_tables if table is not None},
        {chart.name: figures.at_settings(chart, study) for chart in charts if chart is not None},
        said,
        tuple(claims),
    )


def statements(study: StudyView, main: Table, comparisons: Sequence[Comparison]) -> dict[int, list[str]]:
    """A few sentences for every N in which something finished."""
    found = {}
    for n in study.streams:
        rows = [row for row in main.rows if row["streams"] == n and row["bpb"] is not None and study.holds(row)]
        here = [one for one in comparisons if one.num_streams == n]
        if rows:
            found[n] = [_best(rows), *_verdicts(here), *_savings(rows, here), *_order(rows, n)]
            if study.fields:
                found[n][0] = f"With {study.words}: {found[n][0]}"
        if lines := best_values(study, n):
            found[n] = [*found.get(n, []), *lines]
    return found


def _best(rows: Sequence[Row]) -> str:
    best = min(rows, key=lambda row: row["bpb"])
    seeds = f"{best['seeds']} seed{'s' if best['seeds'] != 1 else ''}"
    number = spread(best["bpb"], best["bpb_sd"])
    if len(rows) == 1:
        return f"{best['method']} is the only method with a finished run, with {number} bpb ({seeds})."
    return f"{best['method']} has the lowest mean of {len(rows)} methods, {number} bpb ({seeds})."


def _verdicts(comparisons: Sequence[Comparison]) -> list[str]:
    """Sentences on the methods that are better, worse or neither, compared with each baseline."""
    lines = []
    for against in dict.fromkeys(one.against for one in comparisons):
        mine = [one for one in comparisons if one.against == against]
        parts = []
        for verdict in VERDICTS:
            if names := [one.label for one in mine if one.verdict == verdict]:
                parts.append(f"{verdict.replace(ONE_SEED, 'no statement (one seed)')}: {', '.join(names)}")
        lines.append(f"bpb against {against}: {'; '.join(parts)}.")
    return lines


def _savings(rows: Sequence[Row], comparisons: Sequence[Comparison]) -> list[str]:
    """Sentences on the parameters that methods on the Pareto frontier save against mhc, and their cost in bpb."""
    lines = []
    edge = frontier([(row["added"], row["bpb"]) for row in rows if row["added"]])
    for row in rows:
        against = next((one for one in comparisons if one.label == row["method"] and one.against == "mhc"), None)
        if row["of_mhc"] is None or against is None or (row["added"], row["bpb"]) not in edge:
            continue
        share = f"{row['method']} adds {percent(row['of_mhc'])} of mhc's parameters"
        paired = against.paired
        if paired is None:
            lines.append(f"{share}; they have {NO_PAIR}.")
            continue
        interval = "" if paired.low is None else f" (95% interval {paired.low:+.4f} to {paired.high:+.4f})"
        lines.append(f"{share}; its bpb differs by {paired.mean:+.4f}{interval}: {against.verdict}.")
    return lines


def _order(rows: Sequence[Row], n: int) -> list[str]:
    """The order by bpb of the methods that both have."""
    both = [row for row in rows if row["paper_bpb"] is not None]
    if len(both) < 2:
        return []
    here = " < ".join(row["method"] for row in sorted(both, key=lambda row: row["bpb"]))
    groups: dict[float, list[str]] = {}
    for row in sorted(both, key=lambda row: row["paper_bpb"]):
        groups.setdefault(row["paper_bpb"], []).append(row["method"])
    published = " < ".join(" = ".join(names) for names in groups.values())
    steps = paper()["steps"][str(n)]
    return [f"Order by mean bpb: here {here}; in the paper ({steps:,} steps) {published}."]


# Charts that not every study has, so those of an earlier report are removed.
SOMETIMES = ("curves", "gaps", "loss", "mixing-*", "pareto-*", "parameters", "sweep-*", "cost", "forest-*", "claims*")


@dataclass(frozen=True)
class Report:
    """The files that were written."""

    page: Path
    figures: tuple[Path, ...]
    tables: tuple[Path, ...]
    content: Content


def write_report(results: Results, out: Path, extra_tabs: Sequence[Tab] = ()) -> Report:
    """Writes `report.html`, `figures/` and `tables/` to a folder, from the results alone.

    Args:
        extra_tabs: shown before the last.
    """
    content = compute(results)
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; expected a folder for the report")
    html = page(
        f"{content.study.name}: hyper-connections compared",
        [*(tab for make in pages.TABS if (tab := make(content)) is not None), *extra_tabs, pages.about(content)],
    )
    for name in ("figures", "tables"):
        (out / name).mkdir(parents=True, exist_ok=True)
    figures = _write_figures(content, out / "figures")
    written = _write_tables(content, out / "tables")
    # The page is written last, so that when it exists, so does the rest.
    atomic_write(out / "report.html", html)
    return Report(out / "report.html", tuple(figures), tuple(written), content)


def _write_figures(content: Content, folder: Path) -> list[Path]:
    written: list[Path] = []
    with Bar("figures", len(content.charts)) as bar:
        for done, chart in enumerate(content.charts.values()):
            bar.update(done, chart.name)
            written += plots_mpl.draw(chart, folder)
    stale = {path for name in SOMETIMES for suffix in plots_mpl.SUFFIXES for path in folder.glob(f"{name}{suffix}")}
    for path in stale - set(written):
        path.unlink()
    return written


def _write_tables(content: Content, folder: Path) -> list[Path]:
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
