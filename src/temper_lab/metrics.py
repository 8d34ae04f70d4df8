"""The files that a run writes line by line, and what happens to them when it is resumed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from temper_lab.io import FileError, atomic_write, brief, entry, open_new, parse_json, read_text

# Of one file: a million steps have some 150 MB.
MAX_BYTES = 1 << 30


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
    texts = read_text(path, MAX_BYTES, errors="replace").split("\n")
    for number, text in enumerate(texts[:-1], 1):
        where = f"{path}: line {number}"
        try:
            line = parse_json(text, where)
            entry(line, "step", int, where)
        except FileError as error:
            raise FileError(f"{where} is not a line of metrics: {brief(text)} ({error})") from error
        lines.append(line)
    return lines


def numbers(lines: list[dict[str, Any]], name: str, where: object) -> list[float]:
    """The values of one name, in the lines that have it; what is no number is a FileError."""
    return [entry(line, name, float, where) for line in lines if name in line]


def _rewrite(path: Path, lines: list[dict[str, Any]]) -> None:
    atomic_write(path, "".join(json.dumps(line) + "\n" for line in lines))


class TensorBoard:
    """The same numbers for TensorBoard."""

    def __init__(self, folder: Path, step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError("train.tensorboard needs a package: pip install 'temper-hc[tensorboard]'") from error
        self._writer = SummaryWriter(str(folder), purge_step=step + 1)

    def write(self, line: Mapping[str, Any]) -> None:
        for name, value in line.items():
            if name != "step":
                self._writer.add_scalar(name, value, line["step"])

    def close(self) -> None:
        self._writer.close()
