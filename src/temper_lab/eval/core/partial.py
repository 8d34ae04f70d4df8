"""What an interrupted evaluation leaves, so that the next one goes on from there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from temper_lab.io import atomic_write, dumps, read_json

FORMAT = "temper-core-1"
Answers = list[bool | None]
"""Whether the answer to each item was correct, None where it was not asked yet."""


class Partial:
    """The answers so far in a file beside the results, of one model; another model starts anew.

    Args:
        out: the file of the results; None keeps nothing.
        model: the model's fingerprint.
    """

    def __init__(self, out: Path | None, model: str) -> None:
        self.path = None if out is None else out.with_name(f".{out.name}.partial")
        self._content: dict[str, Any] = {"format": FORMAT, "model": model, "tasks": {}}
        if self.path is None:
            return
        try:
            found = read_json(self.path)
        except ValueError:
            return
        if (found.get("format"), found.get("model")) == (FORMAT, model) and isinstance(found.get("tasks"), dict):
            self._content = found

    def read(self, task: str, num_items: int) -> tuple[Answers, float]:
        """The answers so far and the seconds they took, for the fingerprint of a task."""
        found = self._content["tasks"].get(task)
        match found:
            case {"correct": list(correct), "seconds": int() | float() as seconds}:
                if len(correct) == num_items and all(answer in (True, False, None) for answer in correct):
                    return list(correct), seconds
        return [None] * num_items, 0.0

    def write(self, task: str, correct: Answers, seconds: float) -> None:
        self._content["tasks"][task] = {"correct": correct, "seconds": seconds}
        if self.path is not None:
            atomic_write(self.path, dumps(self.path.name, self._content))

    def forget(self) -> None:
        """Removes the file: the results are there."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
