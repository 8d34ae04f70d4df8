"""All parts of a benchmark, one after the other, as one report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from temper_lab.bench import pair, recompute, sinkhorn, step
from temper_lab.bench.cases import Case, sort_out
from temper_lab.bench.check import check_site
from temper_lab.bench.machine import describe
from temper_lab.bench.setting import Setting
from temper_lab.memory import keep_freed_memory
from temper_lab.progress import Bar

ROWS = ("pair", "peers", "recompute", "sinkhorn", "growth", "step", "skipped")


def bench(setting: Setting) -> dict[str, Any]:
    """Checks, then measures. A backend that differs from `naive` is a ValueError, and there is no report."""
    report: dict[str, Any] = {"setting": describe(setting, keep_freed_memory()), **{name: [] for name in ROWS}}
    with pinned(setting.threads), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        cases = {part: _cases(setting, part, report["skipped"]) for part in setting.parts}
        _check({(case, _width(setting, part)): None for part, members in cases.items() for case in members})
        for result in _results(setting, cases):
            report["setting"] |= result.pop("setting", {})
            for name, rows in result.items():
                report[name] += rows
    return report | {"ahead_of_peers": ahead_of_peers(report["pair"], report["peers"])}


@contextmanager
def pinned(threads: int) -> Iterator[None]:
    """So many threads for torch and for the native kernels, which ask torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def ahead_of_peers(rows: list[dict[str, Any]], peers: list[dict[str, Any]]) -> dict[str, dict[str, bool]]:
    """For every N, whether all TEMPER methods, on the backend a user gets here, beat every peer of the same run.

    In time that is the ratio by the site and the ratio of whole pairs, both; in memory what is kept.
    """
    ahead = {}
    names = [name for name in ("cpu", "fused", "naive") if any(row["backend"] == name for row in rows)]
    for n in dict.fromkeys(row["streams"] for row in peers):
        ours = [row for row in rows if row["method"].startswith("temper-") and row["backend"] == names[0]]
        ours = [row for row in ours if row["streams"] == n]
        theirs = [row for row in peers if row["streams"] == n]
        if ours:
            better = {
                field: max(row[field] for row in ours) < min(row[field] for row in theirs)
                for field in ("ratio", "pair_ratio", "saved_ratio")
            }
            ahead[str(n)] = {"time": better["ratio"] and better["pair_ratio"], "memory": better["saved_ratio"]}
    return ahead


def _width(setting: Setting, part: str) -> int:
    return step.model_config(setting).dim if part == "step" else setting.width


def _cases(setting: Setting, part: str, skipped: list[dict[str, Any]]) -> list[Case]:
    """What a part runs; what it does not goes to `skipped`."""
    if part == "sinkhorn":
        return []
    streams = setting.growth if part == "growth" else setting.streams
    cases, left_out = sort_out(setting.methods, streams, setting.backends, _width(setting, part))
    if part == "recompute":
        # Plain autograd keeps what it keeps, and so do other people's sites.
        cases = [case for case in cases if case.backend not in (None, "naive")]
    skipped += [{"part": part, **entry} for entry in left_out]
    return cases


def _check(wanted: dict[tuple[Case, int], None]) -> None:
    with Bar("check", len(wanted)) as bar:
        for done, (case, width) in enumerate(wanted):
            bar.update(done, str(case))
            if case.backend not in (None, "naive"):
                check_site(case, width)


def _results(setting: Setting, cases: dict[str, list[Case]]) -> Iterator[dict[str, Any]]:
    if timed := [part for part in ("pair", "growth") if part in cases]:
        yield pair.measure(setting, cases.get("pair", []), cases.get("growth", []), " and ".join(timed))
    if "step" in cases:
        yield step.measure(setting, cases["step"], "step")
    if "recompute" in cases:
        yield recompute.measure(setting, cases["recompute"], "recompute")
    if "sinkhorn" in cases:
        yield sinkhorn.measure(setting, "sinkhorn")
