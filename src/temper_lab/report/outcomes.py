"""The outcome of a study's claims: tables, a figure and sentences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from temper_lab.report.charts import Axis, Chart, Mark, Panel, Rule
from temper_lab.report.palette import PLAIN, REGION, VERDICTS
from temper_lab.report.stats import CONFIDENCE
from temper_lab.report.table import DASH, Column, Row, Table, decimal
from temper_lab.report.view import StudyView
from temper_lab.study.claims import OPEN, REFUTED, ROUTING, SHOWN, STREAMS, Finding, Outcome, judge
from temper_lab.study.results import Run


def outcomes(study: StudyView) -> list[Outcome]:
    """Tests every claim of results.json on its runs."""
    base = _flat(study.results.recipe)

    def differing(settings: Mapping[str, Any], *, is_residual: bool) -> dict[str, Any]:
        """The settings of a run that differ from the study's recipe."""
        ignored = ROUTING if is_residual else ()
        return {name: value for name, value in settings.items() if base.get(name) != value and name not in ignored}

    def runs(method: str, num_streams: int, settings: Mapping[str, Any]) -> Iterator[Run]:
        for run in study.runs:
            if method in (run.method, run.label) and (run.streams == num_streams or run.is_residual):
                here, wanted = (differing(one, is_residual=run.is_residual) for one in (run.vary, settings))
                if here == wanted:
                    yield run

    def bpb(method: str, num_streams: int, settings: Mapping[str, Any]) -> dict[int, float]:
        asked = runs(method, num_streams, settings)
        return {run.seed: run.bpb for run in asked if run.is_finished and run.bpb is not None}

    def there(method: str, num_streams: int, settings: Mapping[str, Any]) -> dict[int, str | None]:
        return {run.seed: _failure(run) for run in runs(method, num_streams, settings)}

    return judge(study.results.claims, bpb, there)


def _failure(run: Run) -> str | None:
    """The name of a run that will have no number, with the reason; None for one that has it or may still have it."""
    if run.status in ("failed", "skipped"):
        return f"{run.key} ({run.reason or run.status})"
    return f"{run.key} (finished without a number)" if run.is_finished and run.bpb is None else None


def claims_table(found: Sequence[Outcome]) -> Table:
    """One row for each claim."""
    rows = [
        {
            "claim": one.claim.name,
            "text": one.claim.text,
            "kind": one.claim.kind,
            "verdict": one.verdict,
            "so_far": one.so_far,
            "seeds": one.least.seeds,
            "planned": one.least.planned,
            **{f"tests_{verdict}": _count(one, verdict) for verdict in (SHOWN, REFUTED, OPEN)},
            "p": one.p,
            "p_holm": one.p_holm,
            "added": str(one.claim.record) if one.claim.record else None,
        }
        for one in found
    ]
    so_far = Column("so far", lambda row: row["so_far"], "so_far", is_text=True)
    columns = (
        Column("claim", lambda row: row["claim"], "claim", is_text=True),
        Column("verdict", lambda row: row["verdict"], "verdict", lambda row: row["verdict"] != OPEN, True),
        Column("what is claimed", lambda row: row["text"], "text", is_text=True),
        Column("tests", _tests, "tests_shown", is_text=True),
        Column("seeds", _seeds, "seeds"),
        *([] if all(one.is_complete for one in found) else [so_far]),
        Column("p", lambda row: decimal(row["p"]), "p"),
        Column("p, corrected", lambda row: decimal(row["p_holm"]), "p_holm"),
        Column("written", lambda row: row["added"] or DASH, "added", is_text=True),
    )
    note = (
        "Shown if all tests of a claim are shown, refuted if one is, else open; a test is open until all its planned "
        "runs have finished, and takes no others. p is the largest of them, since all "
        f"have to be shown, and is corrected by Holm for the {len(found)} claims of this study. Verdicts are not "
        "corrected."
    )
    return Table("claims", "Claims", tuple(rows), columns, note)


def tests_table(found: Sequence[Outcome]) -> Table:
    """One row for each comparison of a claim."""
    rows = [_row(one) for outcome in found for one in outcome.findings]
    columns = (
        Column("claim", lambda row: row["claim"], "claim", is_text=True),
        Column("test", lambda row: row["kind"], "kind", is_text=True),
        Column("method", lambda row: row["method"], "method", is_text=True),
        Column("against", lambda row: row["against"], "against", is_text=True),
        Column("N", lambda row: row["streams"], "streams"),
        Column("estimate", lambda row: decimal(row["estimate"], sign=True), "estimate"),
        Column("interval", _interval, "low"),
        Column("true if", _region, "margin"),
        Column("seeds", _seeds, "seeds"),
        Column("p", lambda row: decimal(row["p"]), "p"),
        Column("verdict", lambda row: row["verdict"], "verdict", lambda row: row["verdict"] != OPEN, True),
    )
    note = (
        "bpb of the method minus bpb of `against`, paired by seed, so below 0 is better; for grows and shrinks, the "
        "gain (`against` minus method) per doubling of the axis. Student t over seeds. A 90% interval is that of a "
        "one-sided test at 5%. p is of the test that would show the claim. A test whose planned runs have not all "
        "finished stays open, and its numbers are those of the seeds so far."
    )
    return Table("claim-tests", "Tests of the claims", tuple(rows), columns, note, ("claim",))


def claims_charts(found: Sequence[Outcome]) -> list[Chart]:
    """Charts of every test's interval over the claim's region: one of differences and one of trends."""
    caption = (
        "{} Intervals as in the table; faint: each seed. The shaded part of a row is where the claim is true: it is "
        "shown if the interval lies inside (circle), refuted if it lies outside (cross), open otherwise (diamond)."
    )
    charts = []
    for is_trend, name, title, label, words in (
        (False, "claims", "Claims about differences", "difference in bpb", "bpb of the first minus bpb of the second."),
        (
            True,
            "claims-trends",
            "Claims about trends",
            "gain in bpb per doubling",
            "Gain of the first over the second.",
        ),
    ):
        here = [one for one in found if one.claim.rule.is_trend == is_trend]
        if any(finding.estimate is not None for one in here for finding in one.findings):
            charts.append(Chart(name, title, (_panel(here, label),), caption.format(words)))
    return charts


def claim_lines(found: Sequence[Outcome]) -> list[str]:
    """The number of claims per verdict, and a line for each claim with its findings."""
    if not found:
        return []
    counts = ", ".join(f"{sum(one.verdict == verdict for one in found)} {verdict}" for verdict in VERDICTS)
    lines = [f"{len(found)} claim{'s' if len(found) != 1 else ''}: {counts}."]
    for one in found:
        lines.append(f"{one.claim.name} {one.standing.replace(one.verdict, one.verdict.upper(), 1)}: {one.claim.text}")
        lines += [f"  {finding.sentence}" for finding in one.findings]
    return lines


def explanation(found: Sequence[Outcome]) -> list[str]:
    """Notes on the meaning of the verdicts, and on whether the claims came before the runs."""
    records = [one.claim.record for one in found]
    late = [one.claim.name for one in found if one.claim.record is None or one.claim.record.runs_started]
    lines = [
        "A claim says beforehand what a study is to show and by which test. It ends as shown, refuted or open; open "
        "means that the seeds there are cannot tell, and the interval says what is still possible.",
    ]
    if waiting := sum(not one.is_complete for one in found):
        lines.append(
            f"{waiting} of {len(found)} claims wait for planned runs that have not finished, failed or are not in this "
            "study, and are open until these are there: a verdict before the last seed would be one of several looks. "
            "Their numbers are those of the seeds so far."
        )
    if not late:
        dates = " and ".join(sorted({record.added for record in records if record}))
        lines.append(f"All claims were part of the study before its first run ({dates}).")
    else:
        lines.append(f"Not known to precede the first run: {', '.join(late)}. The table says when each was written.")
    kept = [one.claim.name for one in found if one.verdict == SHOWN and (one.p_holm or 0) < 1 - CONFIDENCE]
    lost = [one.claim.name for one in found if one.verdict == SHOWN and one.claim.name not in kept]
    if len(found) > 1 and (kept or lost):
        after = f"still shown: {', '.join(kept) or 'none'}" + (f"; no longer: {', '.join(lost)}" if lost else "")
        lines.append(
            f"Of {len(found)} claims tested at 5% each, some may be shown by chance. After Holm's correction for their "
            f"number, {after}."
        )
    return lines


def _flat(recipe: Mapping[str, Any]) -> dict[str, Any]:
    sections = [(name, part) for name, part in recipe.items() if isinstance(part, Mapping)]
    return {f"{name}.{key}": value for name, part in sections for key, value in part.items()}


def _count(one: Outcome, verdict: str) -> int:
    return sum(finding.verdict == verdict for finding in one.findings)


def _tests(row: Row) -> str:
    return ", ".join(f"{row[f'tests_{verdict}']} {verdict}" for verdict in VERDICTS if row[f"tests_{verdict}"])


def _row(one: Finding) -> dict[str, Any]:
    claim, sample = one.claim, one.sample
    least, most = claim.rule.region(claim.limit)
    return {
        "claim": claim.name,
        "kind": claim.kind,
        "method": sample.method,
        "against": sample.against,
        "streams": " ".join(map(str, claim.streams)) if sample.num_streams is None else str(sample.num_streams),
        "along": None if not claim.along else "N" if claim.along == STREAMS else claim.along,
        "estimate": one.estimate,
        "confidence": claim.rule.confidence,
        "low": one.low,
        "high": one.high,
        "margin": claim.limit,
        "true_above": least if math.isfinite(least) else None,
        "true_below": most if math.isfinite(most) else None,
        "seeds": one.seeds,
        "planned": one.planned,
        "p": one.p,
        "verdict": one.verdict,
        "sentence": one.sentence,
    }


def _seeds(row: Row) -> str:
    return str(row["seeds"]) if row["seeds"] == row["planned"] else f"{row['seeds']} of {row['planned']}"


def _interval(row: Row) -> str:
    return DASH if row["low"] is None else f"{row['low']:+.4f} .. {row['high']:+.4f} ({row['confidence']:.0%})"


def _region(row: Row) -> str:
    low, high = row["true_above"], row["true_below"]
    if low is None:
        return f"below {high:+g}" if high else "below 0"
    if high is None:
        return f"above {low:+g}" if low else "above 0"
    return f"{low:+g} .. {high:+g}"


def _panel(found: Sequence[Outcome], label: str) -> Panel:
    regions = [one.claim.rule.region(one.claim.limit) for one in found]
    limits = _limits([value for ends in regions for value in ends if math.isfinite(value)], found)
    marks, ticks, y = [], [], 0.0
    for one, region in zip(found, regions, strict=True):
        ticks.append((y, f"{one.claim.name}: {one.verdict}"))
        for finding in one.findings:
            y -= 1
            ticks.append((y, _name(finding)))
            low, high = max(region[0], limits[0]), min(region[1], limits[1])
            below, above = (y - 0.42,) * 2, (y + 0.42,) * 2
            marks.append(Mark(one.claim.name, REGION, (low, high), (y, y), line=False, low=below, high=above))
            marks += _marks(finding, y)
        y -= 1
    rule = Rule("no difference", PLAIN, 0.0, is_vertical=True)
    x = Axis(label, digits=4, limits=limits)
    return Panel("A row for each test", x, Axis(ticks=tuple(ticks)), tuple(marks), (rule,), 130 + 24 * len(ticks))


def _marks(finding: Finding, y: float) -> list[Mark]:
    if finding.estimate is None:
        return []
    look, seeds, name = VERDICTS[finding.verdict], finding.sample.by_seed, _name(finding)
    shape: dict[str, Any] = {"line": False, "points": True}
    marks = []
    if len(seeds) > 1:
        texts, places = tuple(f"seed {seed}" for seed in seeds), (y - 0.25,) * len(seeds)
        marks.append(Mark(name, look, tuple(seeds.values()), places, texts=texts, is_faint=True, **shape))
    bars: dict[str, Any] = (
        {} if finding.low is None or finding.high is None else {"x_low": (finding.low,), "x_high": (finding.high,)}
    )
    of = "" if finding.seeds == finding.planned else f" of {finding.planned}"
    text = f"{finding.verdict}, {finding.seeds}{of} seed{'s' if finding.planned != 1 else ''}"
    return [*marks, Mark(name, look, (finding.estimate,), (y,), texts=(text,), **shape, **bars)]


def _name(finding: Finding) -> str:
    sample = finding.sample
    place = f", {finding.place}" if finding.place else ""
    return f"{sample.method} vs {sample.against}{place}"


def _limits(values: list[float], found: Sequence[Outcome]) -> tuple[float, float]:
    """The ends of the axis, which include all numbers and zero, with a margin."""
    values = [0.0, *values]
    for finding in (finding for one in found for finding in one.findings):
        values += [value for value in (finding.estimate, finding.low, finding.high) if value is not None]
        values += finding.sample.by_seed.values()
    low, high = min(values), max(values)
    room = 0.12 * (high - low) or 0.001
    return low - room, high + room
