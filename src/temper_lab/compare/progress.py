"""How far a run is, from the files that it writes."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any

from temper_lab import metrics
from temper_lab.run import RunFolder

# Steps that say how fast a run is now, validations included.
RECENT = 40


class Tail:
    """The lines that were added to a file since the last look; from the beginning if the file is another one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inode, self._place = 0, 0

    def read(self) -> list[dict[str, Any]]:
        try:
            with open(self.path, "rb") as file:
                inode = self.path.stat().st_ino
                if inode != self._inode:
                    self._inode, self._place = inode, 0
                file.seek(self._place)
                text = file.read()
        except OSError:
            return []
        # The last line may still be on its way.
        whole = text[: text.rfind(b"\n") + 1]
        self._place += len(whole)
        try:
            return [json.loads(line) for line in whole.splitlines()]
        except (ValueError, RecursionError):
            # Replaced between two looks: read it from the beginning next time.
            self._inode = 0
            return []


class Progress:
    """The step, the loss and the speed of a run.

    Args:
        since: the time from which steps count for the speed.
    """

    def __init__(self, folder: RunFolder, steps: int, since: float) -> None:
        self.steps, self.step = steps, 0
        self.loss: float | None = None
        self.bpb: float | None = None
        self._since = since
        self._metrics, self._timing = Tail(folder.metrics), Tail(folder.path / "timing.jsonl")
        self._times: deque[float] = deque(maxlen=RECENT)

    def refresh(self) -> None:
        for line in self._metrics.read():
            self.step, self.loss = line["step"], line["loss"]
            self.bpb = line.get("val_bpb", self.bpb)
        self._times.extend(line["time"] for line in self._timing.read() if line["time"] >= self._since)

    @property
    def seconds_per_step(self) -> float | None:
        if len(self._times) < 2:
            return None
        return (self._times[-1] - self._times[0]) / (len(self._times) - 1)

    @property
    def left(self) -> float | None:
        """Seconds."""
        rate = self.seconds_per_step
        return None if rate is None else rate * (self.steps - self.step)


def state(folder: RunFolder) -> tuple[str, str | None]:
    """The status of a run that nobody is training in, and why it failed."""
    if not folder.is_run:
        return "waiting", None
    content = folder.read()
    status, error = content.get("status"), content.get("error")
    # A run that was killed had no time to say so.
    if status == "running":
        return "killed", None
    return str(status), first_line(error) if status == "failed" else None


def steps_done(folder: RunFolder) -> int:
    rows = metrics.read(folder.metrics)
    return rows[-1]["step"] if rows else 0


def first_line(text: str | None) -> str | None:
    return next((line.strip() for line in (text or "").splitlines() if line.strip()), None)


def last_line(path: Path) -> str | None:
    """Of what a run printed: an error is its last word."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    found = next((line.strip() for line in reversed(lines) if line.strip()), None)
    return found and found.removeprefix("error: ")
