"""The tables of a study in the terminal: all runs while it goes on, all methods at its end."""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from temper_lab.console import PAUSE, duration, tell, visible
from temper_lab.study import vary
from temper_lab.study.results import RESIDUAL, CostRow, Results, Run

if TYPE_CHECKING:
    from rich.table import Table

    from temper_lab.study.runner import Entry, Runner


COLOURS = {"finished": "green", "running": "bold", "failed": "red", "killed": "red", "skipped": "yellow"}
# Lines of the terminal that the table leaves free.
MARGIN = 6
# Seconds between two updates.
REFRESH = 0.5


class LiveTable:
    """The table of a study's runs, as a context manager around `Runner.run`."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._live: Any = None
        self._drawn = self._spoken = time.monotonic()

    def __enter__(self) -> LiveTable:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=True), auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._draw()
            self._live.stop()

    def look(self) -> None:
        now = time.monotonic()
        if self._live is not None and now - self._drawn > REFRESH:
            self._drawn = now
            self._draw()
        elif self._live is None and now - self._spoken > PAUSE:
            self._spoken = now
            parts = [
                f"{entry.cell.key} {_step(entry)}{_number(' bpb ', entry, 'bpb')}" for entry in self._runner.running
            ]
            tell("; ".join([self.summary(), *parts]))

    def changed(self, entry: Entry) -> None:
        """Prints that a run has started or ended."""
        text = entry.status if entry.reason is None else f"{entry.status}: {entry.reason}"
        line = f"{entry.cell.key} {text}{_number(', bpb ', entry, 'bpb') if entry.status == 'finished' else ''}"
        if self._live is None:
            tell(line)
        elif entry.status in ("failed", "killed"):
            from rich.text import Text

            self._live.console.print(Text(visible(line)))

    def summary(self) -> str:
        """The number of runs by status, and the remaining time."""
        counts = Counter(entry.status for entry in self._runner.entries.values())
        total = len(self._runner.entries)
        words = [f"{counts['finished']} of {total} runs finished"]
        words += [f"{count} {status}" for status, count in counts.items() if status != "finished"]
        left = self.left()
        return ", ".join([*words, *([f"ETA {duration(left)}"] if left is not None else [])])

    def left(self) -> float | None:
        """The estimated seconds until the last run ends; None if nothing is running."""
        entries = [entry for entry in self._runner.entries.values() if entry.progress is not None]
        rates = [(entry, rate) for entry in entries if entry.progress and (rate := entry.progress.seconds_per_step)]
        if not (rates and self._runner.running):
            return None
        # Runs may differ in size, so times are scaled by FLOPs.
        mean = sum(rate for _, rate in rates) / sum(entry.flops for entry, _ in rates)
        left = [0.0]
        for entry in entries:
            assert entry.progress is not None
            if entry.status == "running":
                known = entry.progress.left
                left.append(mean * entry.flops * (entry.steps - entry.step) if known is None else known)
        ended = ("running", "finished", "failed", "killed")
        ahead = mean * sum(entry.flops * (entry.steps - entry.step) for entry in entries if entry.status not in ended)
        return max(max(left), (sum(left) + ahead) / self._runner.jobs)

    def _draw(self) -> None:
        from rich.console import Group
        from rich.text import Text

        table = self._table(self._live.console.height - MARGIN)
        self._live.update(Group(table, Text(self.summary(), style="dim")), refresh=True)

    def _table(self, room: int) -> Table:
        from rich.table import Table

        table = Table(box=None)
        table.add_column("run", no_wrap=True)
        table.add_column("status", no_wrap=True)
        for name in ("step", "loss", "bpb", "ETA"):
            table.add_column(name, justify="right", no_wrap=True)
        for entry in self._shown(room):
            colour = COLOURS.get(entry.status, "dim")
            left = entry.progress.left if entry.progress and entry.status == "running" else None
            table.add_row(
                entry.cell.key,
                f"[{colour}]{entry.status}[/]",
                _step(entry),
                _number("", entry, "loss"),
                _number("", entry, "bpb"),
                "" if left is None else duration(left),
            )
        return table

    def _shown(self, room: int) -> list[Entry]:
        """All runs, or as many as there is room for, running and failed ones first."""
        entries = list(self._runner.entries.values())
        if len(entries) <= room:
            return entries
        rank = {"running": 0, "failed": 1, "killed": 1, "elsewhere": 1, "interrupted": 1, "finished": 2, "waiting": 3}
        kept = sorted(entries, key=lambda entry: rank.get(entry.status, 4))[: max(1, room)]
        return [entry for entry in entries if entry in kept]


def _step(entry: Entry) -> str:
    return f"{entry.step:,}/{entry.steps:,}" if entry.progress else "-"


def _number(before: str, entry: Entry, name: str) -> str:
    value = getattr(entry.progress, name, None)
    return "" if value is None else f"{before}{value:.4f}"


@dataclass(frozen=True)
class Row:
    """A method at one N and combination of varied fields, over its finished seeds.

    Args:
        fields: the value of every varied field.
        first, final: the mean bpb at the first and the last validation; `sd` is the standard deviation of the last.
        gap: the mean difference to residual of the same seeds and settings.
        state: of the runs that are not finished, if no run is.
    """

    method: str
    num_streams: int
    fields: Mapping[str, Any]
    added: int | None
    finished: int
    asked: int
    first: float | None
    final: float | None
    sd: float | None
    gap: float | None
    core: float | None
    cost: CostRow | None
    state: str


def rows(results: Results) -> list[Row]:
    """One row for every method, number of streams and combination of varied fields."""
    groups: dict[tuple[str, int, vary.Settings], list[Run]] = {}
    for run in results.runs:
        groups.setdefault((run.method, run.streams, run.settings), []).append(run)
    cost = {(row.method, row.streams): row for row in results.cost.rows} if results.cost else {}
    found = []
    for (method, streams, settings), runs in groups.items():
        finals = _finals(runs)
        residual = _finals(groups.get((RESIDUAL, 1, vary.of_residual(settings)), []))
        values = [*finals.values()]
        done = [run for run in runs if run.seed in finals]
        found.append(
            Row(
                method,
                streams,
                _values(results, runs[0]),
                runs[0].added,
                len(done),
                len(runs),
                _mean([run.val.bpb[0] for run in done if run.val.bpb]),
                _mean(values),
                statistics.stdev(values) if len(values) > 1 else None,
                _mean([finals[seed] - residual[seed] for seed in finals if seed in residual]),
                _mean([run.core_score for run in done]),
                None if vary.has_own_step(settings) else cost.get((method, streams)),
                next((run.status for run in runs if run.seed not in finals), "finished"),
            )
        )
    return found


def show(results: Results) -> None:
    """Prints the table."""
    from rich.table import Table

    from temper_lab.console import console

    found = rows(results)
    columns = ["method", "N", *map(vary.short, results.vary)]
    columns += ["added", "seeds", "first bpb", "final bpb", "to residual", "step"]
    has_core = any(row.core is not None for row in found)
    table = Table(*columns[:1], box=None)
    for name in [*columns[1:], *(["CORE"] if has_core else [])]:
        table.add_column(name, justify="right", no_wrap=True)
    for row in found:
        table.add_row(*_words(row), *([_decimal(row.core)] if has_core else []))
    console(160).print(table)


def _values(results: Results, run: Run) -> dict[str, Any]:
    """The value of every varied field in a run."""
    return {name: vary.value_in(results.recipe, run.vary, name, is_residual=run.is_residual) for name in results.vary}


def _finals(runs: Sequence[Run]) -> dict[int, float]:
    """The final bpb of the finished runs, by seed."""
    return {run.seed: run.bpb for run in runs if run.is_finished and run.bpb is not None}


def _words(row: Row) -> Sequence[str]:
    final = _decimal(row.final) if row.final is not None else row.state
    if row.sd is not None:
        final += f" ± {row.sd:.4f}"
    cost = "-"
    if row.cost is not None:
        cost = f"{_decimal(row.cost.step_ms.median, ',.0f')} ms ({_decimal(row.cost.ratio.median, '.2f')}x)"
    return (
        row.method,
        str(row.num_streams),
        *map(vary.show_or_dash, row.fields.values()),
        _decimal(row.added, ","),
        str(row.finished) if row.finished == row.asked else f"{row.finished} of {row.asked}",
        _decimal(row.first),
        final,
        _decimal(row.gap, "+.4f"),
        cost,
    )


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean of the values that are not None."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _decimal(value: float | None, form: str = ".4f") -> str:
    return "-" if value is None else format(value, form)
