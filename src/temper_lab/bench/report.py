"""A report as tables for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

Row = dict[str, Any]


def show(report: Row, console: Console) -> None:
    """Prints every part that was measured."""
    setting = report["setting"]
    console.print(_headline(setting), highlight=False)
    titles = {
        "pair": "Block pair: time and memory, as multiples of plain residual adds",
        "growth": "One site against the number of streams",
        "step": "Whole training step of the lab's model, as multiples of the residual one",
        "recompute": "Kept for the backward of 8 blocks, as multiples of plain residual adds",
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
        kept = setting["pair_saved_bytes"] / 1e6
        lines.append(
            f"memory bandwidth {setting['bandwidth_gb_s']} GB/s; the residual pair takes "
            f"{_times(setting['pair_ms'])} ms and keeps {kept:.1f} MB"
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
        "whole pair": _ratio(row["pair_ratio_spread"]),
        "kept": f"{row['saved_ratio']:.2f}",
        "of bandwidth": f"{row['bandwidth_share']:.0%}",
    }


def _growth(row: Row) -> dict[str, str]:
    return {**_case(row), "site ms": _times(row["site_ms"]), "of the fewest": f"{row['times_least']:.2f}"}


def _step(row: Row) -> dict[str, str]:
    return {
        **_case(row),
        "ms": _times(row["step_ms"]),
        "time": _ratio(row["ratio_spread"]),
        "kept": f"{row['saved_ratio']:.2f}",
    }


def _recompute(row: Row) -> dict[str, str]:
    return {
        **_case(row),
        "kept": f"{row['saved_ratio']:.2f}",
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
