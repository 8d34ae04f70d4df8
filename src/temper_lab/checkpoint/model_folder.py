"""A model folder: `config.json`, `model.safetensors` and the tokenizer, enough to load a model anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from temper_lab.io import (
    atomic_dir,
    check_finite,
    dumps,
    read_dir,
    read_json,
    read_tensors,
    write_json,
    write_tensors,
)

FORMAT = "temper-lab-1"


@dataclass(frozen=True)
class ModelFolder:
    """What a model folder holds."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]

    def file(self, name: str = "tokenizer.json") -> Path:
        """The path of another file, such as the tokenizer, or a ValueError if there is none."""
        path = self.path / name
        if not path.is_file():
            raise ValueError(f"the model folder {self.path} has no {name}")
        return path


def save_model(
    folder: str | Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    files: Mapping[str, str | bytes | Path] | None = None,
) -> Path:
    """Writes a model folder whole or not at all; an earlier model folder of that name is replaced.

    Args:
        files: other files by name, as text, bytes or a path to copy: `{"tokenizer.json": path}`.
    """
    folder, files = Path(folder).absolute(), dict(files or {})
    if "format" in config:
        raise ValueError("config has an entry 'format', which is this function's own")
    dumps("config", config)
    check_finite(tensors, "the model")
    for name in files:
        if name in ("config.json", "model.safetensors") or Path(name).name != name:
            raise ValueError(f"{name!r} is not the name of a file to put beside config.json and model.safetensors")
    if folder.exists():
        _check_ours(folder)
    with atomic_dir(folder, is_ours=_check_ours) as work:
        for name, content in files.items():
            data = content.read_bytes() if isinstance(content, Path) else content
            (work / name).write_bytes(data.encode() if isinstance(data, str) else data)
        write_tensors(work / "model.safetensors", tensors)
        write_json(work / "config.json", {"format": FORMAT, **config})
    return folder


def load_model(folder: str | Path) -> ModelFolder:
    """Reads a model folder, or raises ValueError for one that is missing, foreign or damaged."""
    return read_dir(Path(folder), _load)


def _load(folder: Path) -> ModelFolder:
    if not folder.is_dir():
        raise ValueError(f"there is no model folder {folder}")
    config = _read_config(folder)
    tensors = read_tensors(folder / "model.safetensors")
    check_finite(tensors, folder / "model.safetensors")
    return ModelFolder(folder, config, tensors)


def _read_config(folder: Path) -> dict[str, Any]:
    config = read_json(folder / "config.json")
    if config.pop("format", None) != FORMAT:
        raise ValueError(f"{folder} is not a model folder of this lab: config.json has no format {FORMAT!r}")
    return config


def _check_ours(folder: Path) -> bool:
    """Replacing a folder deletes it, so it has to be a model folder, or empty; anything else is a ValueError."""
    try:
        if not folder.is_dir() or any(folder.iterdir()):
            _read_config(folder)
    except ValueError as error:
        raise ValueError(f"{folder} exists and is not a model folder, so it is not replaced: {error}") from error
    return True
