"""What people see while a study runs: all runs in a terminal, now and then a plain line elsewhere."""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from temper_lab.progress import PAUSE, duration

if TYPE_CHECKING:
    from rich.table import Table

    from temper_lab.compare.runner import Entry, Runner

COLOURS = {"finished": "green", "running": "bold", "failed": "red", "killed": "red", "skipped": "yellow"}
# Lines of a terminal that the table leaves to what is above and below it.
MARGIN = 6
# Seconds between two pictures.
REFRESH = 0.5


class View:
    """The runs of a study; use it as a context around `Runner.run`."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._live: Any = None
        self._drawn = self._spoken = time.monotonic()

    def __enter__(self) -> View:
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
            print("; ".join([self.summary(), *parts]), file=sys.stderr, flush=True)

    def changed(self, entry: Entry) -> None:
        """A run has started or ended."""
        text = entry.status if entry.reason is None else f"{entry.status}: {entry.reason}"
        line = f"{entry.cell.key} {text}{_number(', bpb ', entry, 'bpb') if entry.status == 'finished' else ''}"
        if self._live is None:
            print(line, file=sys.stderr, flush=True)
        elif entry.status in ("failed", "killed"):
            from rich.text import Text

            self._live.console.print(Text(line))

    def summary(self) -> str:
        """How many runs are where, and how long it will take."""
        counts = Counter(entry.status for entry in self._runner.entries.values())
        total = len(self._runner.entries)
        words = [f"{counts['finished']} of {total} runs finished"]
        words += [f"{count} {status}" for status, count in counts.items() if status != "finished"]
        left = self.left()
        return ", ".join([*words, *([f"ETA {duration(left)}"] if left is not None else [])])

    def left(self) -> float | None:
        """Seconds until the last run ends, from what the runs so far took; None if nothing goes on."""
        entries = [entry for entry in self._runner.entries.values() if entry.progress is not None]
        rates = [(entry, rate) for entry in entries if entry.progress and (rate := entry.progress.seconds_per_step)]
        if not (rates and self._runner.running):
            return None
        # Runs may be of different sizes: what one has taken says something of another by their FLOPs.
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
        """All runs, or as many as there is room for: first what goes on and what went wrong."""
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
