"""The checkpoints of a run: `step-000123/` with model, optimizer, state and a manifest to check them by."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from temper_lab.io import (
    atomic_dir,
    dumps,
    read_json,
    read_tensors,
    remove_dir,
    write_json,
    write_tensors,
)

FORMAT = "temper-checkpoint-1"
FILES = ("model.safetensors", "optimizer.safetensors", "state.json")
STEP = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    step: int
    state: dict[str, Any]

    def model(self) -> dict[str, Tensor]:
        return read_tensors(self.path / "model.safetensors")

    def optimizer(self) -> dict[str, Tensor]:
        return read_tensors(self.path / "optimizer.safetensors")


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
    """Writes `step-<step>/` whole or not at all, then removes checkpoints that nobody needs.

    Call it on one rank, with gathered tensors. Out of disk, it raises OSError and earlier checkpoints stay.

    Args:
        state: what JSON can hold: schedule, loader, RNG, metrics.
        keep_last: how many of the newest to keep, this one included.
        keep_best: a name in `state["metrics"]`; the checkpoint where it is lowest stays too.
    """
    for name, value, least in (("step", step, 0), ("keep_last", keep_last, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} is {value!r}; expected a whole number >= {least}")
    dumps("the state", state)
    final = Path(folder) / f"step-{step:06d}"
    # What a killed save has left, perhaps gigabytes, is removed first: this one could need the room.
    with atomic_dir(final, is_ours=_is_ours) as work:
        write_tensors(work / "model.safetensors", model)
        write_tensors(work / "optimizer.safetensors", optimizer)
        write_json(work / "state.json", state)
        manifest = {
            "format": FORMAT,
            "step": step,
            "metrics": dict(state.get("metrics", {})),
            "files": {name: _fingerprint(work / name) for name in FILES},
        }
        write_json(work / "manifest.json", manifest)
    prune(folder, step, keep_last=keep_last, keep_best=keep_best)
    return final


def latest(folder: str | Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest complete checkpoint, and a message for everything newer that had to be skipped."""
    folder = Path(folder)
    skipped: list[str] = []
    for step, path in sorted(_steps(folder).items(), reverse=True):
        try:
            return Checkpoint(path, step, verify(path)), skipped
        except (ValueError, OSError) as error:
            # Gone altogether, it was pruned by the run that is being looked at.
            if path.exists():
                skipped.append(f"skipped {path}: {error}")
    return None, skipped


def verify(path: Path) -> dict[str, Any]:
    """The state of a checkpoint after a check of every byte of it, or a ValueError."""
    manifest = _manifest(path)
    for name, expected in manifest["files"].items():
        if _fingerprint(path / name) != expected:
            raise ValueError(f"{name} is not what was saved (its checksum differs)")
    return read_json(path / "state.json")


def prune(folder: str | Path, step: int, *, keep_last: int, keep_best: str | None = None) -> None:
    """Removes older checkpoints than the last few and the best.

    What is newer than `step`, or broken, or not ours, is neither counted nor touched.
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
        remove_dir(Path(folder) / f"step-{number:06d}")


def _is_ours(folder: Path) -> bool:
    """Whether a folder holds nothing but files of a checkpoint, complete or not, so that it may be replaced."""
    return {path.name for path in folder.iterdir()} <= {"manifest.json", *FILES}


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
    if not isinstance(files, dict) or set(files) != set(FILES) or not isinstance(manifest.get("metrics"), dict):
        raise ValueError("manifest.json is incomplete")
    for name, expected in files.items():
        if not (path / name).is_file():
            raise ValueError(f"{name} is missing")
        size = (path / name).stat().st_size
        if not isinstance(expected, dict) or size != expected.get("size"):
            raise ValueError(f"{name} is truncated or changed: it has {size} bytes, not those that were saved")
    return manifest


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
