"""The checkpoints of a run: `step-000123/` with model, optimizer, state and a manifest to check them by.

The model and the optimizer are two files, or the shards of a sharded run (`temper_lab.train.shards`).
"""

from __future__ import annotations

import base64
import hashlib
import math
import random
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from temper.registry import check_int
from temper_lab.io import (
    atomic_dir,
    dumps,
    read_json,
    read_tensors,
    remove_dir,
    write_json,
    write_tensors,
)
from temper_lab.train import shards

FORMAT = "temper-checkpoint-1"
FILES = ("model.safetensors", "optimizer.safetensors", "state.json")
STEP = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    step: int
    state: dict[str, Any]

    def model(self, like: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The weights by name, whole; shards, if the checkpoint is sharded and so is the tensor to be `like`."""
        return self._read("model", like)

    def optimizer(self, like: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The state of the optimizers, as `model` gives the weights."""
        return self._read("optimizer", like)

    def _read(self, part: str, like: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        if (self.path / shards.INDEX).is_file():
            return shards.read(self.path, part, like)
        return read_tensors(self.path / f"{part}.safetensors")


@contextmanager
def writing(
    folder: str | Path,
    step: int,
    state: Mapping[str, Any],
    *,
    keep_last: int = 2,
    keep_best: str | None = None,
) -> Iterator[tuple[Path, dict[str, Any]]]:
    """A folder for the tensors, which becomes `step-<step>/` whole or not at all; then old checkpoints are removed.

    With it comes a dictionary for the fingerprints of the files that the caller has taken. Enter it on one rank. Out
    of disk, it raises OSError and earlier checkpoints stay.

    Args:
        state: values for JSON: schedule, loader, RNG, metrics.
        keep_last: the number of newest checkpoints to keep, including this one.
        keep_best: a name in `state["metrics"]`; the checkpoint with its lowest value is kept too.
    """
    for name, value, least in (("step", step, 0), ("keep_last", keep_last, 1)):
        check_int(name, value, least)
    dumps("the state", state)
    files: dict[str, Any] = {}
    # The remains of a killed save, perhaps gigabytes, are removed first to make room.
    with atomic_dir(path_of(folder, step), is_ours=_is_ours) as work:
        yield work, files
        write_json(work / "state.json", state)
        others = [path for path in sorted(work.iterdir()) if path.name not in files]
        manifest = {
            "format": FORMAT,
            "step": step,
            "metrics": dict(state.get("metrics", {})),
            "files": files | {path.name: fingerprint(path) for path in others},
        }
        write_json(work / "manifest.json", manifest)
    prune(folder, step, keep_last=keep_last, keep_best=keep_best)


def save(
    folder: str | Path,
    step: int,
    *,
    model: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    state: Mapping[str, Any],
    keep_last: int = 2,
    keep_best: str | None = None,
) -> Path:
    """Writes a checkpoint of whole tensors; call it on one rank. The rest is as in `writing`."""
    with writing(folder, step, state, keep_last=keep_last, keep_best=keep_best) as (work, _):
        write_tensors(work / "model.safetensors", model)
        write_tensors(work / "optimizer.safetensors", optimizer)
    return path_of(folder, step)


def path_of(folder: str | Path, step: int) -> Path:
    """The checkpoint of a step."""
    return Path(folder) / f"step-{step:06d}"


def latest(folder: str | Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest complete checkpoint, and a message for everything newer that had to be skipped."""
    folder = Path(folder)
    skipped: list[str] = []
    for step, path in sorted(_steps(folder).items(), reverse=True):
        try:
            return Checkpoint(path, step, verify(path)), skipped
        except (ValueError, OSError) as error:
            # If it is gone, the run has pruned it meanwhile.
            if path.exists():
                skipped.append(f"skipped {path}: {error}")
    return None, skipped


def verify(path: Path) -> dict[str, Any]:
    """Verifies every byte of a checkpoint and gives its state, or raises ValueError."""
    manifest = _manifest(path)
    # Hashing leaves Python's lock alone, and many shards are many disks.
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(fingerprint, (path / name for name in manifest["files"]))
        for (name, expected), actual in zip(manifest["files"].items(), found, strict=True):
            if actual != expected:
                raise ValueError(f"{name} is not what was saved (its checksum differs)")
    return read_json(path / "state.json")


def prune(folder: str | Path, step: int, *, keep_last: int, keep_best: str | None = None) -> None:
    """Removes all checkpoints but the last few and the best.

    Folders that are newer than `step`, damaged or not ours are neither counted nor removed.
    """
    manifests = {}
    for number, path in _steps(Path(folder)).items():
        try:
            if number <= step:
                manifests[number] = _manifest(path)
        except ValueError:
            continue
    keep = set(sorted(manifests)[-keep_last:])
    if keep_best is not None:
        scores = {number: manifest["metrics"].get(keep_best) for number, manifest in manifests.items()}
        scores = {number: score for number, score in scores.items() if _is_number(score)}
        if scores:
            keep.add(min(scores, key=lambda number: (scores[number], number)))
    for number in manifests.keys() - keep:
        remove_dir(path_of(folder, number))


def _is_ours(folder: Path) -> bool:
    """True if a folder has only files of a checkpoint, complete or not, so that it may be replaced."""
    names = {path.name for path in folder.iterdir()}
    return all(name in ("manifest.json", shards.INDEX, *FILES) or shards.FILE.fullmatch(name) for name in names)


def _steps(folder: Path) -> dict[int, Path]:
    if not folder.is_dir():
        return {}
    found = {path: STEP.fullmatch(path.name) for path in folder.iterdir() if path.is_dir()}
    return {int(match[1]): path for path, match in found.items() if match}


def _manifest(path: Path) -> dict[str, Any]:
    manifest = read_json(path / "manifest.json")
    if manifest.get("format") != FORMAT:
        raise ValueError(f"manifest.json has format {manifest.get('format')!r}, expected {FORMAT!r}")
    files = manifest.get("files")
    if not isinstance(files, dict) or not _are_complete(files) or not isinstance(manifest.get("metrics"), dict):
        raise ValueError("manifest.json is incomplete")
    for name, expected in files.items():
        if not (path / name).is_file():
            raise ValueError(f"{name} is missing")
        size = (path / name).stat().st_size
        if not isinstance(expected, dict) or size != expected.get("size"):
            raise ValueError(f"{name} is truncated or changed: it has {size} bytes, not those that were saved")
    return manifest


def _are_complete(names: Collection[str]) -> bool:
    """Whether these are all the files of a checkpoint: whole tensors, or shards."""
    parts = set(names) - {"state.json", shards.INDEX}
    is_sharded = shards.INDEX in names and bool(parts) and all(map(shards.FILE.fullmatch, parts))
    return "state.json" in names and (is_sharded or set(names) == set(FILES))


def fingerprint(path: Path) -> dict[str, Any]:
    """Size and checksum of a file."""
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def rng_state() -> dict[str, Any]:
    """The generators of this process: python, numpy if it is in use, torch, and CUDA if it is in use."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {"python": [version, list(words), gauss], "torch": _encode(torch.get_rng_state())}
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [name, keys.tolist(), *rest]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = [_encode(part) for part in torch.cuda.get_rng_state_all()]
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restores every generator; those of CUDA are skipped on a machine without it."""
    try:
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        torch.set_rng_state(_decode(state["torch"]))
        if "numpy" in state:
            import numpy

            numpy.random.set_state(tuple(state["numpy"]))
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state_all([_decode(part) for part in state["cuda"]])
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError, AttributeError, IndexError) as error:
        raise ValueError(f"this is not the state of random number generators: {error!r}") from error


def _encode(state: Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode()


def _decode(text: str) -> Tensor:
    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)
