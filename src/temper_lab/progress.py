"""What people see while they wait: a live bar in a terminal, now and then a plain line elsewhere."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from rich.console import Console

# Seconds between plain lines.
PAUSE = 10.0


class Bar:
    """Progress towards a total, with a few words. Use it as a context.

    Args:
        what: one or two words.
        total: None when it is not known.
        is_shown: only one of many processes shows a bar.
    """

    def __init__(self, what: str, total: float | None, *, done: float = 0, is_shown: bool = True) -> None:
        self.what, self.total, self.done = what, total, done
        self._is_shown = is_shown
        self._is_live = is_shown and sys.stderr.isatty()
        self._progress: Any = None
        self._spoken = time.monotonic()

    def __enter__(self) -> Bar:
        if self._is_live:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            columns = ("[bold]{task.description}", BarColumn(bar_width=24), "{task.percentage:>3.0f}%")
            words = TextColumn("{task.fields[words]}")
            self._progress = Progress(*columns, words, console=Console(stderr=True))
            self._progress.start()
            self._task = self._progress.add_task(self.what, total=self.total, completed=self.done, words="")
        return self

    def expect(self, total: float) -> None:
        """Sets a total that was not known before."""
        self.total = total
        if self._progress is not None:
            self._progress.update(self._task, total=total)

    def update(self, done: float, words: str = "", *, is_notable: bool = False) -> None:
        """Moves to `done`; a notable moment gets its plain line even if the last was just now."""
        self.done = done
        if self._progress is not None:
            self._progress.update(self._task, completed=done, words=words)
        elif self._is_shown and (is_notable or time.monotonic() - self._spoken > PAUSE):
            self._spoken = time.monotonic()
            share = f" {done / self.total:4.0%}" if self.total else ""
            print(f"{self.what}{share} {words}".rstrip(), file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """A line above the bar."""
        if self._is_shown:
            if self._progress is not None:
                from rich.text import Text

                # As an object, not with markup off: that would hold for the bar below it as well.
                self._progress.console.print(Text(text))
            else:
                print(text, file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()


@contextmanager
def waiting(what: str, *, is_shown: bool = True) -> Iterator[Callable[[str], None]]:
    """For work that cannot say how far it is: a spinner in a terminal."""
    if not (is_shown and sys.stderr.isatty()):
        yield lambda words: None
        return
    from rich.console import Console

    with Console(stderr=True).status(what) as status:
        yield lambda words: status.update(f"{what} {words}")


def console(width: int) -> Console:
    """For tables: the terminal, or, into a file or a pipe, as wide as they are."""
    from rich.console import Console

    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=width)


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3 h 20 min`, `2 d 4 h`."""
    seconds = max(0.0, seconds)
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24:,} d {hours % 24} h"


def size(num_bytes: float) -> str:
    """`640 MB`, `1.5 GB`."""
    return f"{num_bytes / 1e6:,.0f} MB" if num_bytes < 1e9 else f"{num_bytes / 1e9:,.1f} GB"


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has held."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
