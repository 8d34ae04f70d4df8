"""Ctrl-C, SIGTERM and SIGHUP as a wish to stop, which is granted between two steps."""

from __future__ import annotations

import signal
import threading
from types import FrameType

# SIGHUP is the end of a terminal, and not of every system.
SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class StopWish:
    """Remembers the first signal; a second Ctrl-C does not wait."""

    def __init__(self) -> None:
        self.number = 0
        self._before = {}
        # Python handles signals in the main thread alone.
        if threading.current_thread() is threading.main_thread():
            # What is ignored stays ignored: `nohup` asks for that.
            heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._note) for number in heard}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = number

    def forget(self) -> None:
        """Gives the signals back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
