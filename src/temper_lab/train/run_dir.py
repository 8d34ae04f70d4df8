"""The folder of a run: its layout, its lock, `run.json` and the JSONL logs."""

from __future__ import annotations

import json
import os
import platform
import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from temper_lab.io import (
    FileError,
    atomic_write,
    brief,
    dumps,
    entry,
    is_locked,
    locked,
    open_new,
    parse_json,
    read_json,
    read_text,
)

if TYPE_CHECKING:
    from temper_lab.data import DataFingerprint
    from temper_lab.recipe import Recipe

# The limit per file; a million steps take about 150 MB.
MAX_LOG_BYTES = 1 << 30


class JsonlLog:
    """A JSONL log whose lines have a `step`. Opening it at a step drops the lines after that step."""

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        _rewrite_log(path, [line for line in read_log(path) if line["step"] <= step])
        # Stays open as long as the run.
        self._file = open_new(path)

    def write(self, line: Mapping[str, Any]) -> None:
        # Full precision, so that equal files mean equal runs.
        self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        self._file.flush()

    def sync(self) -> None:
        """Flushes all lines to disk; a checkpoint must not be newer than the log."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_log(path: Path, *numbers: str) -> list[dict[str, Any]]:
    """The complete lines of a file; a kill may have cut the last one short.

    Args:
        numbers: the names that every line must have beside its step.
    """
    if not path.is_file():
        return []
    lines = []
    texts = read_text(path, MAX_LOG_BYTES, errors="replace").split("\n")
    for number, text in enumerate(texts[:-1], 1):
        where = f"{path}: line {number}"
        try:
            line = parse_json(text, where)
            entry(line, "step", int, where)
            for name in numbers:
                entry(line, name, float, where)
        except FileError as error:
            raise FileError(f"{where} is not a line of metrics: {brief(text)} ({error})") from error
        lines.append(line)
    return lines


def values(lines: list[dict[str, Any]], name: str, where: object) -> list[float]:
    """The values of one name in the lines that have it; FileError if one is not a number."""
    return [entry(line, name, float, where) for line in lines if name in line]


def _rewrite_log(path: Path, lines: list[dict[str, Any]]) -> None:
    atomic_write(path, "".join(json.dumps(line) + "\n" for line in lines))


class TensorBoard:
    """Writes the same numbers to TensorBoard files."""

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


FORMAT = "temper-run-1"
FILE_NAME = "run.json"


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run: `run.json`, `metrics.jsonl`, `checkpoints/` and at the end `model/`."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def is_run(self) -> bool:
        return (self.path / FILE_NAME).is_file()

    def begin(self, *, resume: bool) -> None:
        """Creates the folder, or raises ValueError if a run cannot start or resume in it."""
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path} is a file; expected a folder for the run")
        if resume and not self.is_run:
            raise ValueError(f"{self.path} holds no run to resume (no {FILE_NAME})")
        if not resume and self.is_run:
            raise ValueError(f"{self.path} holds a run already; --resume continues it, another --out starts a new one")
        # A start that was killed leaves only hidden files: a lock and perhaps a partial run.json.
        if not resume and self.path.is_dir() and any(not path.name.startswith(".") for path in self.path.iterdir()):
            raise ValueError(f"{self.path} is not empty; expected a new folder for the run")
        self.path.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Claims the run for this process alone; the claim ends with the process."""
        with locked(self.path / ".lock") as is_mine:
            if not is_mine:
                raise ValueError(f"another process is training in {self.path}")
            yield

    def is_claimed(self) -> bool:
        return is_locked(self.path / ".lock")

    def read(self) -> dict[str, Any]:
        """Reads `run.json`, or raises ValueError."""
        path = self.path / FILE_NAME
        content = read_json(path)
        if content.get("format") != FORMAT:
            raise FileError(f"{path} has format {brief(content.get('format'))}, expected {FORMAT!r}")
        for name, kind in (("recipe", dict), ("recipe_name", str), ("status", str), ("started", str)):
            if name in content:
                entry(content, name, kind, path)
        return content

    def recipe(self) -> dict[str, Any]:
        """The recipe that `run.json` holds, as plain values."""
        return entry(self.read(), "recipe", dict, self.path / FILE_NAME)

    def data(self) -> DataFingerprint | None:
        """The data of the run; None if it is from before they were recorded."""
        from temper_lab.data import DataFingerprint

        try:
            found = self.read().get("data")
            return None if found is None else DataFingerprint.from_dict(found)
        except ValueError as error:
            raise FileError(f"{self.path / FILE_NAME}: {error}") from error

    def write(self, **changes: Any) -> None:
        """Changes some entries of `run.json`, atomically."""
        content = self.read() if self.is_run else {"format": FORMAT}
        atomic_write(self.path / FILE_NAME, dumps(FILE_NAME, content | changes))

    def resume_command(self, num_processes: int = 1) -> str:
        from temper_lab import plugins

        many = f"torchrun --nproc-per-node {num_processes} -m temper_lab"
        words = shlex.join(["--out", str(self.path), "--resume", *plugins.words()])
        return f"{'temper' if num_processes == 1 else many} train {words}"


def versions() -> dict[str, Any]:
    """The versions and settings that can change the last bits of a number."""
    import torch

    import temper

    return {
        "temper": temper.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "threads": torch.get_num_threads(),
    }


def summary(path: Path) -> dict[str, Any]:
    """One line of `temper runs`: status, step and best bpb of a run, as far as its files can be read."""
    folder = RunFolder(path)
    line: dict[str, Any] = {"run": str(path), "status": "unreadable", "step": None, "steps": None, "best_bpb": None}
    try:
        where, content = path / FILE_NAME, folder.read()
        recipe = entry(content, "recipe", dict, where)
        model, train = (entry(recipe, name, dict, where) for name in ("model", "train"))
        line |= {
            "status": entry(content, "status", str, where),
            # Runs of earlier versions record only the preset of their method.
            "method": entry({"method": entry(model, "preset", str, where), **content}, "method", str, where),
            "preset": entry(model, "preset", str, where),
            "num_streams": entry(model, "num_streams", int, where),
            "steps": entry(train, "steps", int, where),
            "recipe": entry(content, "recipe_name", str, where),
            "started": entry(content, "started", str, where),
        }
        rows = read_log(folder.metrics)
        bpbs = values(rows, "val_bpb", folder.metrics)
    except (ValueError, OSError) as error:
        return line | {"status": "unreadable", "error": str(error)}
    # A run that was killed could not change its status.
    if line["status"] == "running" and not folder.is_claimed():
        line["status"] = "killed"
    return line | {"step": rows[-1]["step"] if rows else 0, "best_bpb": min(bpbs, default=None)}


def find(folder: Path) -> list[Path]:
    """All runs in a folder and below it, in the order of their names."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    return sorted(file.parent for file in folder.rglob(FILE_NAME) if _is_run_file(file))


def now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")


def _is_run_file(file: Path) -> bool:
    """True if a run.json is ours; a damaged one is recognized by the files beside it."""
    try:
        return read_json(file).get("format") == FORMAT
    except ValueError:
        return (file.parent / "metrics.jsonl").is_file()


def recipe_of(path: Path) -> Recipe | None:
    """The recipe that a model was trained with, if the model is in the folder of its run."""
    # Imported here, because it needs torch, which `temper runs` does not.
    from temper_lab.recipe import Recipe

    for folder in (RunFolder(path), RunFolder(path.absolute().parent)):
        try:
            if folder.is_run:
                return Recipe.from_dict(folder.recipe(), str(folder.path))
        # The model is usable even if the record of its training is damaged.
        except ValueError:
            continue
    return None
