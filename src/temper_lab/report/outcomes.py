"""What became of a study's claims: tables, a figure and sentences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from temper_lab.report.charts import Axis, Chart, Mark, Panel, Rule
from temper_lab.report.claims import OPEN, REFUTED, ROUTING, SHOWN, STREAMS, Finding, Outcome, judge, read_claims
from temper_lab.report.formats import DASH, Column, Row, Table, decimal
from temper_lab.report.results import Study
from temper_lab.report.statistics import CONFIDENCE
from temper_lab.report.styles import PLAIN, Style

# Told apart by shape as well as by colour.
LOOKS = {
    SHOWN: Style("#1b8f56", marker="circle"),
    REFUTED: Style("#d0443a", marker="x"),
    OPEN: Style("#8a8f98", marker="diamond"),
}
REGION = Style("#5a8fd0")


def outcomes(study: Study) -> list[Outcome]:
    """Every claim that results.json holds, tested on its runs; raises ValueError for one that cannot be read."""
    try:
        claims = read_claims(study.raw.get("claims") or [])
    except ValueError as error:
        raise ValueError(f"the claims in the results: {error}") from error
    base = _flat(study.raw.get("recipe"))
    varied = {entry["key"]: entry.get("vary") or {} for entry in study.raw["runs"]}

    def differing(settings: Mapping[str, Any], *, is_residual: bool) -> dict[str, Any]:
        """What is not as in the recipe that all runs share, of what a run depends on."""
        ignored = ROUTING if is_residual else ()
        return {name: value for name, value in settings.items() if base.get(name) != value and name not in ignored}

    def bpb(method: str, streams: int, settings: Mapping[str, Any]) -> dict[int, float]:
        found = {}
        for run in study.runs:
            is_asked = method in (run.method, run.label) and (run.streams == streams or run.is_residual)
            if is_asked and run.is_finished and run.bpb is not None:
                here, wanted = (differing(one, is_residual=run.is_residual) for one in (varied[run.key], settings))
                if here == wanted:
                    found[run.seed] = run.bpb
        return found

    return judge(claims, bpb)


def claims_table(found: Sequence[Outcome]) -> Table:
    """One row for each claim."""
    rows = [
        {
            "claim": one.claim.name,
            "text": one.claim.text,
            "kind": one.claim.kind,
            "verdict": one.verdict,
            **{f"tests_{verdict}": _count(one, verdict) for verdict in (SHOWN, REFUTED, OPEN)},
            "p": one.p,
            "p_holm": one.p_holm,
            "added": str(one.claim.record) if one.claim.record else None,
        }
        for one in found
    ]
    columns = (
        Column("claim", lambda row: row["claim"], "claim", is_text=True),
        Column("verdict", lambda row: row["verdict"], "verdict", lambda row: row["verdict"] != OPEN, True),
        Column("what is claimed", lambda row: row["text"], "text", is_text=True),
        Column("tests", _tests, "tests_shown", is_text=True),
        Column("p", lambda row: decimal(row["p"]), "p"),
        Column("p, corrected", lambda row: decimal(row["p_holm"]), "p_holm"),
        Column("written", lambda row: row["added"] or DASH, "added", is_text=True),
    )
    note = (
        "Shown if all tests of a claim are shown, refuted if one is, else open. p is the largest of them, since all "
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
        Column("seeds", lambda row: str(row["seeds"]), "seeds"),
        Column("p", lambda row: decimal(row["p"]), "p"),
        Column("verdict", lambda row: row["verdict"], "verdict", lambda row: row["verdict"] != OPEN, True),
    )
    note = (
        "bpb of the method minus bpb of `against`, paired by seed, so below 0 is better; for grows and shrinks, the "
        "gain (`against` minus method) per doubling of the axis. Student t over seeds. A 90% interval is that of a "
        "one-sided test at 5%. p is of the test that would show the claim."
    )
    return Table("claim-tests", "Tests of the claims", tuple(rows), columns, note, "claim")


def claims_charts(found: Sequence[Outcome]) -> list[Chart]:
    """Every test with its interval, above what the claim allows: differences, and trends, which have another unit."""
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
    """How many claims ended how, and one line for each, with its findings."""
    if not found:
        return []
    counts = ", ".join(f"{sum(one.verdict == verdict for one in found)} {verdict}" for verdict in LOOKS)
    lines = [f"{len(found)} claim{'s' if len(found) != 1 else ''}: {counts}."]
    for one in found:
        lines.append(f"{one.claim.name} {one.verdict.upper()}: {one.claim.text}")
        lines += [f"  {finding.sentence}" for finding in one.findings]
    return lines


def explanation(found: Sequence[Outcome]) -> list[str]:
    """What the verdicts mean, and whether the claims came before the runs."""
    records = [one.claim.record for one in found]
    late = [one.claim.name for one in found if one.claim.record is None or one.claim.record.runs_started]
    lines = [
        "A claim says beforehand what a study is to show and by which test. It ends as shown, refuted or open; open "
        "means that the seeds there are cannot tell, and the interval says what is still possible.",
    ]
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


def _flat(recipe: Any) -> dict[str, Any]:
    sections = recipe.items() if isinstance(recipe, Mapping) else ()
    return {
        f"{name}.{key}": value for name, part in sections if isinstance(part, Mapping) for key, value in part.items()
    }


def _count(one: Outcome, verdict: str) -> int:
    return sum(finding.verdict == verdict for finding in one.findings)


def _tests(row: Row) -> str:
    return ", ".join(f"{row[f'tests_{verdict}']} {verdict}" for verdict in LOOKS if row[f"tests_{verdict}"])


def _row(one: Finding) -> dict[str, Any]:
    claim, sample = one.claim, one.sample
    least, most = claim.rule.region(claim.limit)
    return {
        "claim": claim.name,
        "kind": claim.kind,
        "method": sample.method,
        "against": sample.against,
        "streams": " ".join(map(str, claim.streams)) if sample.streams is None else str(sample.streams),
        "along": None if not claim.along else "N" if claim.along == STREAMS else claim.along,
        "estimate": one.estimate,
        "confidence": claim.rule.confidence,
        "low": one.low,
        "high": one.high,
        "margin": claim.limit,
        "true_above": least if math.isfinite(least) else None,
        "true_below": most if math.isfinite(most) else None,
        "seeds": one.seeds,
        "p": one.p,
        "verdict": one.verdict,
        "sentence": one.sentence,
    }


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
            band = {"low": (y - 0.42,) * 2, "high": (y + 0.42,) * 2}
            marks.append(Mark(one.claim.name, REGION, (low, high), (y, y), line=False, **band))
            marks += _marks(finding, y)
        y -= 1
    rule = Rule("no difference", PLAIN, 0.0, is_vertical=True)
    x = Axis(label, digits=4, limits=limits)
    return Panel("A row for each test", x, Axis(ticks=tuple(ticks)), tuple(marks), (rule,), 130 + 24 * len(ticks))


def _marks(finding: Finding, y: float) -> list[Mark]:
    if finding.estimate is None:
        return []
    look, seeds, name = LOOKS[finding.verdict], finding.sample.by_seed, _name(finding)
    shape = {"line": False, "points": True}
    marks = []
    if len(seeds) > 1:
        texts, places = tuple(f"seed {seed}" for seed in seeds), (y - 0.25,) * len(seeds)
        marks.append(Mark(name, look, tuple(seeds.values()), places, texts=texts, is_faint=True, **shape))
    bars = {} if finding.low is None or finding.high is None else {"x_low": (finding.low,), "x_high": (finding.high,)}
    text = f"{finding.verdict}, {finding.seeds} seed{'s' if finding.seeds != 1 else ''}"
    return [*marks, Mark(name, look, (finding.estimate,), (y,), texts=(text,), **shape, **bars)]


def _name(finding: Finding) -> str:
    sample = finding.sample
    place = f", {finding.place}" if finding.place else ""
    return f"{sample.method} vs {sample.against}{place}"


def _limits(values: list[float], found: Sequence[Outcome]) -> tuple[float, float]:
    """The ends of the axis: everything, zero, and some room, in which a region may go on beyond the last number."""
    values = [0.0, *values]
    for finding in (finding for one in found for finding in one.findings):
        values += [value for value in (finding.estimate, finding.low, finding.high) if value is not None]
        values += finding.sample.by_seed.values()
    low, high = min(values), max(values)
    room = 0.12 * (high - low) or 0.001
    return low - room, high + room
