"""Ctrl-C and SIGTERM as a wish to stop, which is granted between two steps."""

from __future__ import annotations

import signal
import threading
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopWish:
    """Remembers the first signal; a second Ctrl-C does not wait."""

    def __init__(self) -> None:
        self.number = 0
        self._before = {}
        # Python handles signals in the main thread alone.
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = number

    def forget(self) -> None:
        """Gives the signals back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
