"""Everything that a report shows, from results.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from temper_lab.report import figures, sweeps, tables
from temper_lab.report.charts import Chart
from temper_lab.report.comparisons import Comparison, baselines, compare
from temper_lab.report.formats import Table
from temper_lab.report.results import Study
from temper_lab.report.statements import statements


@dataclass(frozen=True)
class Content:
    """Tables, charts and sentences of a study, by name."""

    study: Study
    comparisons: tuple[Comparison, ...]
    tables: dict[str, Table]
    charts: dict[str, Chart]
    statements: dict[int, list[str]]

    @property
    def lines(self) -> list[str]:
        """The sentences, each with its N."""
        found = [f"N = {n}: {line}" for n, lines in self.statements.items() for line in lines]
        return found or ["No run has finished with a bpb yet, so there is nothing to compare."]

    def to_dict(self) -> dict[str, Any]:
        """What `temper report --json` prints."""
        rows = {name: [dict(row) for row in table.rows] for name, table in self.tables.items()}
        return {"study": self.study.name, "statements": self.lines, "tables": rows}


def compute(results: Mapping[str, Any]) -> Content:
    """Raises ValueError if this is not the content of a results.json; writes nothing."""
    study = Study.of(results)
    main, cost = tables.main_table(study), tables.cost_table(study)
    compared = {against: compare(study, against) for against in baselines(study)}
    comparisons = [one for rows in compared.values() for one in rows]
    all_tables = [main, tables.significance_table(comparisons), cost, tables.core_table(study)]
    all_tables += [tables.curves_table(study), tables.runs_table(study)]
    charts = [
        figures.curves(study),
        figures.gaps(study),
        figures.losses(study),
        *figures.mixing(study),
        figures.pareto(study, main),
        figures.pareto(study, main, "core"),
        sweeps.parameters(study),
        *sweeps.sweep_charts(study, main),
        figures.cost(study, cost),
        *(figures.forest(study, rows) for rows in compared.values()),
    ]
    return Content(
        study,
        tuple(comparisons),
        {table.name: table for table in all_tables if table is not None},
        {chart.name: chart for chart in charts if chart is not None},
        statements(study, main, comparisons),
    )
