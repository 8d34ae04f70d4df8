"""The folder of a run: what is where in it, who is writing to it, and how it went."""

from __future__ import annotations

import platform
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from temper_lab import metrics
from temper_lab.io import FileError, atomic_write, brief, dumps, entry, is_locked, locked, read_json

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
        """Makes the folder, or raises ValueError when this is not the folder to start or to resume in."""
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path} is a file; expected a folder for the run")
        if resume and not self.is_run:
            raise ValueError(f"{self.path} holds no run to resume (no {FILE_NAME})")
        if not resume and self.is_run:
            raise ValueError(f"{self.path} holds a run already; --resume continues it, another --out starts a new one")
        # A start that was killed leaves a lock and perhaps a part of run.json, whose names begin with a dot.
        if not resume and self.path.is_dir() and any(not path.name.startswith(".") for path in self.path.iterdir()):
            raise ValueError(f"{self.path} is not empty; expected a new folder for the run")
        self.path.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Only one process writes to a run. The claim ends with the process, however that ends."""
        with locked(self.path / ".lock") as is_mine:
            if not is_mine:
                raise ValueError(f"another process is training in {self.path}")
            yield

    def is_claimed(self) -> bool:
        return is_locked(self.path / ".lock")

    def read(self) -> dict[str, Any]:
        """What `run.json` says, or a ValueError."""
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

    def write(self, **changes: Any) -> None:
        """Changes some entries of `run.json`, which is never there in part."""
        content = self.read() if self.is_run else {"format": FORMAT}
        atomic_write(self.path / FILE_NAME, dumps(FILE_NAME, content | changes))

    def resume_command(self, num_processes: int = 1) -> str:
        many = f"torchrun --nproc-per-node {num_processes} -m temper_lab"
        return f"{'temper' if num_processes == 1 else many} train --out {shlex.quote(str(self.path))} --resume"


def versions() -> dict[str, Any]:
    """What has a say in the last bits of a number."""
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
            "preset": entry(model, "preset", str, where),
            "num_streams": entry(model, "num_streams", int, where),
            "steps": entry(train, "steps", int, where),
            "recipe": entry(content, "recipe_name", str, where),
            "started": entry(content, "started", str, where),
        }
        rows = metrics.read(folder.metrics)
        bpbs = metrics.numbers(rows, "val_bpb", folder.metrics)
    except (ValueError, OSError) as error:
        return line | {"status": "unreadable", "error": str(error)}
    # A run that was killed had no time to say so.
    if line["status"] == "running" and not folder.is_claimed():
        line["status"] = "killed"
    return line | {"step": rows[-1]["step"] if rows else 0, "best_bpb": min(bpbs, default=None)}


def find(folder: Path) -> list[Path]:
    """All runs in a folder and below it, in the order of their names."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    return sorted(file.parent for file in folder.rglob(FILE_NAME) if _is_ours(file))


def now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")


def _is_ours(file: Path) -> bool:
    """Other programs have files of this name; one of ours that is damaged still has our files beside it."""
    try:
        return read_json(file).get("format") == FORMAT
    except ValueError:
        return (file.parent / "metrics.jsonl").is_file()
