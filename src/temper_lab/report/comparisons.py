"""Every method against a baseline: paired over seeds, corrected for their number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from temper_lab.report.results import Study
from temper_lab.report.statistics import CONFIDENCE, Paired, holm, t_quantile

ONE_SEED = "one seed: no statement"
NO_PAIR = "no common seed"
VERDICTS = ("better", "worse", "within noise", ONE_SEED, NO_PAIR)


@dataclass(frozen=True)
class Comparison:
    """bpb of a method minus bpb of the baseline, seed by seed; below 0 is better.

    Args:
        differences: by seed.
        paired: None without a common seed.
        p_holm: corrected for all comparisons with the same baseline at the same N and settings.
        settings: the varied fields of the runs, on both sides.
    """

    against: str
    label: str
    streams: int
    differences: dict[int, float]
    paired: Paired | None
    p_holm: float | None
    verdict: str
    settings: Mapping[str, Any] = field(default_factory=dict)


def baselines(study: Study) -> list[str]:
    """Residual and mhc, as far as they have finished runs."""
    mhc = "mhc" if "mhc" in study.labels else next((run.label for run in study.runs if run.preset == "mhc"), None)
    candidates = [label for label in (study.baseline, mhc) if label is not None]
    return [label for label in candidates if any(study.measured(label, n) for n in study.streams)]


def compare(study: Study, against: str) -> list[Comparison]:
    """One comparison for each method and N in which both have finished."""
    return [one for streams in study.streams for one in _compare_at(study, against, streams)]


def _compare_at(study: Study, against: str, streams: int) -> list[Comparison]:
    reference = study.measured(against, streams)
    rows = []
    for label in study.labels_at(streams):
        runs = study.measured(label, streams)
        if label == against or not runs or not reference:
            continue
        seeds = sorted(runs.keys() & reference.keys())
        # `measured` has a bpb for each.
        differences = {seed: (runs[seed].bpb or 0.0) - (reference[seed].bpb or 0.0) for seed in seeds}
        rows.append((label, differences, Paired.of(list(differences.values())) if seeds else None))
    corrected = iter(holm([paired.p for *_, paired in rows if paired is not None and paired.p is not None]))
    comparisons = []
    for label, differences, paired in rows:
        p = next(corrected) if paired is not None and paired.p is not None else None
        verdict = _verdict(paired, p)
        comparisons.append(Comparison(against, label, streams, differences, paired, p, verdict, study.here))
    return comparisons


def _verdict(paired: Paired | None, p_holm: float | None) -> str:
    if paired is None:
        return NO_PAIR
    if p_holm is None:
        return ONE_SEED
    if p_holm >= 1 - CONFIDENCE:
        return "within noise"
    return "better" if paired.mean < 0 else "worse"


def explanation(comparisons: Sequence[Comparison]) -> list[str]:
    """What these numbers mean, for readers who do not do this every day."""
    pairs = sorted({row.paired.pairs for row in comparisons if row.paired is not None})
    lines = [
        "Runs of the same seed see the same data in the same order, so methods are compared seed by seed: "
        "bpb of the method minus bpb of the baseline, averaged over the seeds. Below 0 is better.",
        "The interval is the 95% confidence interval of that mean (Student t on the paired differences). "
        "The verdict is corrected for the number of comparisons with the same baseline at the same N (Holm): "
        "it says better or worse only if the corrected p is below 0.05, so an interval may leave out 0 and the verdict "
        "still be within noise.",
    ]
    few = [count for count in pairs if 2 <= count <= 4]
    if few:
        times = " and ".join(f"{t_quantile(0.5 + CONFIDENCE / 2, n - 1):.1f} for {n} pairs" for n in few)
        lines.append(
            f"Few seeds make wide intervals: the half width is the standard error times {times} "
            "(with many it would be 2.0). Within noise does not mean equal: it means that these seeds cannot tell, "
            "and the interval says how large a difference they would have missed."
        )
    if 1 in pairs:
        lines.append("With a single common seed there is nothing to measure noise with, so there is no statement.")
    return lines
