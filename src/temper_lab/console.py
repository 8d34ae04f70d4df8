"""Terminal output, and the signals that stop a process: progress bars, tables, units, Ctrl-C."""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from rich.console import Console

# Seconds between lines where there is no terminal.
PAUSE = 10.0


# Names and texts from files must not command a terminal, or read in another order than they are.
_CODES = (*range(9), *range(11, 32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_CONTROLS = {code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" for code in _CODES}


def visible(text: str) -> str:
    """The text with control characters, other than tabs and line ends, as escapes."""
    return text.translate(_CONTROLS)


def tell(text: str) -> None:
    """A line of progress. A terminal that is gone, or a log on a full disk, is no reason to stop working."""
    with suppress(OSError):
        print(visible(text), file=sys.stderr, flush=True)


class Bar:
    """A progress bar with a label, as a context manager.

    Args:
        what: the label, one or two words.
        total: the total, or None if it is not known.
        is_shown: show the bar; false on every process but one.
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
        """Moves to `done`. A notable update is printed even if the last line was recent."""
        self.done = done
        if self._progress is not None:
            self._progress.update(self._task, completed=done, words=words)
        elif self._is_shown and (is_notable or time.monotonic() - self._spoken > PAUSE):
            self._spoken = time.monotonic()
            share = f" {done / self.total:4.0%}" if self.total else ""
            tell(f"{self.what}{share} {words}".rstrip())

    def say(self, text: str) -> None:
        """Prints a line above the bar."""
        if self._is_shown:
            if self._progress is not None:
                from rich.text import Text

                # Printed as an object: switching markup off would also affect the bar below.
                self._progress.console.print(Text(visible(text)))
            else:
                tell(text)

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()


@contextmanager
def waiting(what: str, *, is_shown: bool = True) -> Iterator[Callable[[str], None]]:
    """Shows a spinner in a terminal during work of unknown length."""
    if not (is_shown and sys.stderr.isatty()):
        yield lambda words: None
        return
    from rich.console import Console

    with Console(stderr=True).status(what) as status:
        yield lambda words: status.update(f"{what} {words}")


def console(width: int) -> Console:
    """A console for tables: as wide as the terminal, or unlimited for a file or a pipe."""
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
    """The peak memory of this process in bytes; 0 where the system does not tell."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    try:
        # Windows has no such module.
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


# SIGHUP, sent when a terminal closes, does not exist on every system.
SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class StopSignal:
    """Records the first signal; a second Ctrl-C interrupts at once."""

    def __init__(self) -> None:
        self.number = 0
        self._before = {}
        # Python handles signals in the main thread only.
        if threading.current_thread() is threading.main_thread():
            # An ignored signal stays ignored, as `nohup` wants.
            heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._note) for number in heard}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = number

    def forget(self) -> None:
        """Restores the previous signal handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)


# Constants of glibc's malloc.h, and the largest values that mallopt accepts.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST_TRIM, LARGEST_MMAP = 2**31 - 1, 32 * 2**20


@cache
def keep_freed_memory() -> bool:
    """Makes malloc keep freed memory for the rest of the process; gives False where that is not possible.

    Otherwise glibc returns large buffers to the system, and every training step faults the same pages in again. Buffers
    above 32 MiB are still returned.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, TypeError, AttributeError):
        # The C library is not glibc.
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP)) and bool(mallopt(M_TRIM_THRESHOLD, LARGEST_TRIM))
