"""Everything that a report shows, from results.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from temper_lab.report import figures, sweeps, tables
from temper_lab.report.charts import Chart
from temper_lab.report.claims import Outcome
from temper_lab.report.comparisons import Comparison, baselines, compare
from temper_lab.report.core import core_lines, core_table
from temper_lab.report.formats import Table
from temper_lab.report.outcomes import claim_lines, claims_charts, claims_table, outcomes, tests_table
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
    claims: tuple[Outcome, ...] = ()

    @property
    def lines(self) -> list[str]:
        """The sentences, each with its N."""
        found = [f"N = {n}: {line}" for n, lines in self.statements.items() for line in lines]
        return found or ["No run has finished with a bpb yet, so there is nothing to compare."]

    def to_dict(self) -> dict[str, Any]:
        """What `temper report --json` prints."""
        rows = {name: [dict(row) for row in table.rows] for name, table in self.tables.items()}
        found = {"study": self.study.name, "statements": self.lines, "tables": rows}
        return found | ({"claims": claim_lines(self.claims)} if self.claims else {})


def compute(results: Mapping[str, Any]) -> Content:
    """Raises ValueError if this is not the content of a results.json; writes nothing."""
    study = Study.of(results)
    main, cost, core = tables.main_table(study), tables.cost_table(study), core_table(study)
    compared = {against: compare(study, against) for against in baselines(study)}
    comparisons = [one for rows in compared.values() for one in rows]
    # Figures and sentences are of one setting, the tables of all.
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
