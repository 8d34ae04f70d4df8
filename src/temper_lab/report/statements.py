"""What the numbers say, in sentences that are computed."""

from __future__ import annotations

from collections.abc import Sequence

from temper_lab.report.comparisons import NO_PAIR, ONE_SEED, VERDICTS, Comparison
from temper_lab.report.counts import paper
from temper_lab.report.formats import Row, Table, percent, spread
from temper_lab.report.results import Study
from temper_lab.report.series import frontier
from temper_lab.report.sweeps import best_values


def statements(study: Study, main: Table, comparisons: Sequence[Comparison]) -> dict[int, list[str]]:
    """A few sentences for every N in which something finished."""
    found = {}
    for n in study.streams:
        rows = [row for row in main.rows if row["streams"] == n and row["bpb"] is not None and study.holds(row)]
        here = [one for one in comparisons if one.streams == n]
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
    """Who is better, worse or neither than each baseline."""
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
    """What methods on the Pareto frontier save of mhc's parameters, and what that costs in bpb."""
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
    ours = " < ".join(row["method"] for row in sorted(both, key=lambda row: row["bpb"]))
    groups: dict[float, list[str]] = {}
    for row in sorted(both, key=lambda row: row["paper_bpb"]):
        groups.setdefault(row["paper_bpb"], []).append(row["method"])
    theirs = " < ".join(" = ".join(names) for names in groups.values())
    steps = paper()["steps"][str(n)]
    return [f"Order by mean bpb: here {ours}; in the paper ({steps:,} steps) {theirs}."]
