"""Runs all parts of a benchmark, after checking outputs and gradients against `naive`, and prints the report."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

import temper
from temper_lab.bench.cases import PEER_PACKAGE, Case, Setting, find_peers, sort_out
from temper_lab.bench.measure import WARMUP, check_site, cpu_name, pinned
from temper_lab.bench.parts import measure_pair, measure_recompute, measure_sinkhorn, measure_step, model_config
from temper_lab.console import Bar, keep_freed_memory

if TYPE_CHECKING:
    from rich.console import Console


def describe(setting: Setting, keeps_freed_memory: bool) -> dict[str, Any]:
    """The setting of a report: sizes, versions and machine."""
    return {
        **{name: list(value) if isinstance(value, tuple) else value for name, value in asdict(setting).items()},
        "warmup_rounds": WARMUP,
        "times": "forward + backward, float32",
        "cpu": cpu_name(),
        "versions": {
            "temper": temper.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            PEER_PACKAGE: find_peers()[0],
        },
        "keeps_freed_memory": keeps_freed_memory,
        "bandwidth_gb_s": None,
    }


ROWS = ("pair", "peers", "recompute", "sinkhorn", "growth", "step", "skipped")


def bench(setting: Setting) -> dict[str, Any]:
    """Checks, then measures. A backend that differs from `naive` raises ValueError, and there is no report."""
    report: dict[str, Any] = {"setting": describe(setting, keep_freed_memory()), **{name: [] for name in ROWS}}
    with pinned(setting.threads), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        cases = {part: _cases(setting, part, report["skipped"]) for part in setting.parts}
        _check_sites({(case, _width(setting, part)): None for part, members in cases.items() for case in members})
        for result in _results(setting, cases):
            report["setting"] |= result.pop("setting", {})
            for name, rows in result.items():
                report[name] += rows
    return report | {"ahead_of_peers": ahead_of_peers(report["pair"], report["peers"])}


def ahead_of_peers(rows: list[dict[str, Any]], peers: list[dict[str, Any]]) -> dict[str, dict[str, bool]]:
    """Tells for every N whether all TEMPER methods, on the default backend, beat every peer of the same run.

    Time means both the ratio by the site and the ratio of whole pairs; memory means the bytes saved for backward.
    """
    ahead = {}
    names = [name for name in ("cpu", "fused", "naive") if any(row["backend"] == name for row in rows)]
    for n in dict.fromkeys(row["streams"] for row in peers):
        own = [row for row in rows if row["method"].startswith("temper-") and row["backend"] == names[0]]
        own = [row for row in own if row["streams"] == n]
        others = [row for row in peers if row["streams"] == n]
        if own:
            better = {
                field: max(row[field] for row in own) < min(row[field] for row in others)
                for field in ("ratio", "pair_ratio", "saved_ratio")
            }
            ahead[str(n)] = {"time": better["ratio"] and better["pair_ratio"], "memory": better["saved_ratio"]}
    return ahead


def _width(setting: Setting, part: str) -> int:
    return model_config(setting).dim if part == "step" else setting.width


def _cases(setting: Setting, part: str, skipped: list[dict[str, Any]]) -> list[Case]:
    """The cases that a part runs; the others are added to `skipped`."""
    if part == "sinkhorn":
        return []
    streams = setting.growth if part == "growth" else setting.streams
    cases, left_out = sort_out(setting.methods, streams, setting.backends, _width(setting, part))
    if part == "recompute":
        # Recomputation does not apply to plain autograd, nor to sites of other packages.
        cases = [case for case in cases if case.backend not in (None, "naive")]
    skipped += [{"part": part, **entry} for entry in left_out]
    return cases


def _check_sites(wanted: dict[tuple[Case, int], None]) -> None:
    with Bar("check", len(wanted)) as bar:
        for done, (case, width) in enumerate(wanted):
            bar.update(done, str(case))
            if case.backend not in (None, "naive"):
                check_site(case, width)


def _results(setting: Setting, cases: dict[str, list[Case]]) -> Iterator[dict[str, Any]]:
    if timed := [part for part in ("pair", "growth") if part in cases]:
        yield measure_pair(setting, cases.get("pair", []), cases.get("growth", []), " and ".join(timed))
    if "step" in cases:
        yield measure_step(setting, cases["step"], "step")
    if "recompute" in cases:
        yield measure_recompute(setting, cases["recompute"], "recompute")
    if "sinkhorn" in cases:
        yield measure_sinkhorn(setting, "sinkhorn")


Row = dict[str, Any]


def show(report: Row, console: Console) -> None:
    """Prints every part that was measured."""
    setting = report["setting"]
    console.print(_headline(setting), highlight=False)
    titles = {
        "pair": "Block pair: time and memory, as multiples of plain residual adds",
        "growth": "One site against the number of streams",
        "step": "Whole training step of the lab's model, as multiples of the residual one",
        "recompute": "Saved for the backward pass of 8 blocks, as multiples of plain residual adds",
        "sinkhorn": "Sinkhorn alone, 20 iterations, against log-domain autograd",
    }
    columns = {"pair": _pair, "growth": _growth, "step": _step, "recompute": _recompute, "sinkhorn": _sinkhorn}
    for part, title in titles.items():
        rows = [*report[part], *(report["peers"] if part == "pair" else [])]
        if rows:
            _table(title, [columns[part](row) for row in rows], console)
    _close(report, console)


def _headline(setting: Row) -> str:
    lines = [
        f"width {setting['width']}, {setting['tokens']} tokens, {_count(setting['threads'], 'thread')}, "
        f"{_count(setting['rounds'], 'interleaved round')} after {setting['warmup_rounds']}, {setting['times']}",
        f"{setting['cpu']}, torch {setting['versions']['torch']}",
        "freed memory stays with the process" if setting["keeps_freed_memory"] else "freed memory goes to the system",
    ]
    if setting["bandwidth_gb_s"]:
        saved = setting["pair_saved_bytes"] / 1e6
        lines.append(
            f"memory bandwidth {setting['bandwidth_gb_s']} GB/s; the residual pair takes "
            f"{_times(setting['pair_ms'])} ms and saves {saved:.1f} MB"
        )
    if step := setting.get("step"):
        lines.append(
            f"step: depth {step['depth']}, width {step['width']}, {step['tokens']:,} tokens, {step['times']}, "
            f"{_count(step['rounds'], 'round')}, "
            f"{_times(step['step_ms'])} ms with residual adds"
        )
    return "\n".join(lines)


def _table(title: str, rows: list[dict[str, str]], console: Console) -> None:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in rows[0]:
        table.add_column(name, justify="left" if name in ("method", "backend", "logits") else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row.values())
    console.print(table)


def _case(row: Row) -> dict[str, str]:
    return {"method": row["method"], "N": str(row["streams"]), "backend": row["backend"] or "-"}


def _pair(row: Row) -> dict[str, str]:
    return {
        **_case(row),
        "site ms": _times(row["site_ms"]),
        "time": _ratio(row["ratio_spread"]),
        "chained": _ratio(row["chained_ratio_spread"]),
        "whole pair": _ratio(row["pair_ratio_spread"]),
        "saved": f"{row['saved_ratio']:.2f}",
        "of bandwidth": f"{row['bandwidth_share']:.0%}",
    }


def _growth(row: Row) -> dict[str, str]:
    return {**_case(row), "site ms": _times(row["site_ms"]), "of the fewest": f"{row['times_least']:.2f}"}


def _step(row: Row) -> dict[str, str]:
    return {
        **_case(row),
        "ms": _times(row["step_ms"]),
        "time": _ratio(row["ratio_spread"]),
        "saved": f"{row['saved_ratio']:.2f}",
    }


def _recompute(row: Row) -> dict[str, str]:
    return {
        **_case(row),
        "saved": f"{row['saved_ratio']:.2f}",
        "with recompute": f"{row['recompute_saved_ratio']:.2f}",
        "in groups of": str(row["group"]),
    }


def _sinkhorn(row: Row) -> dict[str, str]:
    return {
        "N": str(row["streams"]),
        "logits": row["logits"],
        "backend": row["backend"],
        "autograd ms": _times(row["autograd_ms"]),
        "ms": _times(row["ms"]),
        "faster by": f"{row['speedup']:.1f}",
        "columns off by": f"{row['column_error']:.0e}",
        "newton ms": _times(row["newton_ms"]),
        "of 20 rounds": f"{row['newton_ratio']:.2f}",
        "its columns": f"{row['newton_column_error']:.0e}",
    }


def _close(report: Row, console: Console) -> None:
    if report["setting"]["versions"]["hyper-connections"] is None:
        console.print("hyper-connections is not installed, so there are no peers (pip install hyper-connections)")
    for n, ahead in report["ahead_of_peers"].items():
        words = ", ".join(f"{what} {'yes' if is_so else 'no'}" for what, is_so in ahead.items())
        console.print(f"ahead of every peer at N={n}: {words}", highlight=False)
    for entry in report["skipped"]:
        where = f" on {entry['backend']}" if entry["backend"] else ""
        console.print(
            f"skipped in {entry['part']}: {entry['method']}, N={entry['streams']}{where}: {entry['reason']}",
            highlight=False,
            soft_wrap=True,
        )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _times(spread: dict[str, float]) -> str:
    digits = 2 if spread["median"] < 100 else 0
    return f"{spread['median']:.{digits}f} ({spread['low']:.{digits}f} .. {spread['high']:.{digits}f})"


def _ratio(spread: dict[str, float]) -> str:
    return f"{spread['median']:.3f} ({spread['low']:.3f} .. {spread['high']:.3f})"
