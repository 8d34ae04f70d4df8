"""The files that a run writes line by line, and what happens to them when it is resumed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from temper_lab.io import atomic_write, open_new


class Lines:
    """A file of JSON objects, each with a `step`. Opened at a step, it forgets what came after that step."""

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        _rewrite(path, [line for line in read(path) if line["step"] <= step])
        # Open as long as the run.
        self._file = open_new(path)

    def write(self, line: Mapping[str, Any]) -> None:
        # Numbers in full, so that equal files mean equal runs.
        self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        self._file.flush()

    def sync(self) -> None:
        """Waits until all lines are on the disk; a checkpoint must not know more than they do."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file; a kill may have cut the last one short."""
    if not path.is_file():
        return []
    lines = []
    for number, text in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True), 1):
        if not text.endswith("\n"):
            break
        try:
            line = json.loads(text)
            line["step"] = int(line["step"])
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}: line {number} is not a line of metrics: {text.strip()[:60]!r}") from error
        lines.append(line)
    return lines


def _rewrite(path: Path, lines: list[dict[str, Any]]) -> None:
    atomic_write(path, "".join(json.dumps(line) + "\n" for line in lines))


class TensorBoard:
    """The same numbers for TensorBoard."""

    def __init__(self, folder: Path, step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError("train.tensorboard needs a package: pip install 'temper[tensorboard]'") from error
        self._writer = SummaryWriter(str(folder), purge_step=step + 1)

    def write(self, line: Mapping[str, Any]) -> None:
        for name, value in line.items():
            if name != "step":
                self._writer.add_scalar(name, value, line["step"])

    def close(self) -> None:
        self._writer.close()
