"""A model folder: `config.json`, `model.safetensors` and the tokenizer, enough to load a model anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from temper.gates import with_vector_gates
from temper_lab import plugins
from temper_lab.distributed import check_fit, device_of
from temper_lab.io import (
    ATTEMPTS,
    atomic_dir,
    check_finite,
    dumps,
    entry,
    read_dir,
    read_json,
    read_tensors,
    write_json,
    write_tensors,
)
from temper_lab.model import GPT, ModelConfig
from temper_lab.tokenizer import Tokenizer
from temper_lab.train import checkpoint
from temper_lab.train.run_dir import RunFolder

FORMAT = "temper-lab-1"


@dataclass(frozen=True)
class ModelFolder:
    """The content of a model folder.

    Args:
        imports: the modules of other packages that its parts come from, as the file has them.
    """

    path: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    imports: Any = None

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
    """Writes a model folder atomically, replacing an earlier one of that name.

    Args:
        files: other files by name, as text, bytes or a path to copy: `{"tokenizer.json": path}`.
    """
    folder, files = Path(folder).absolute(), dict(files or {})
    for own in ("format", "imports"):
        if own in config:
            raise ValueError(f"config has an entry {own!r}, which is this function's own")
    modules = plugins.modules_of(config)
    dumps("config", config)
    check_finite(tensors, "the model")
    for name in files:
        if name in ("config.json", "model.safetensors") or Path(name).name != name:
            raise ValueError(f"{name!r} is not the name of a file to put beside config.json and model.safetensors")
    if folder.exists():
        _check_model_folder(folder)
    with atomic_dir(folder, is_ours=_check_model_folder) as work:
        for name, content in files.items():
            data = content.read_bytes() if isinstance(content, Path) else content
            (work / name).write_bytes(data.encode() if isinstance(data, str) else data)
        write_tensors(work / "model.safetensors", tensors)
        imports = {"imports": modules} if modules else {}
        write_json(work / "config.json", {"format": FORMAT, **imports, **config})
    return folder


def load_model(folder: str | Path) -> ModelFolder:
    """Reads a model folder, or raises ValueError for one that is missing, foreign or damaged."""
    return read_dir(Path(folder), _read)


def _read(folder: Path) -> ModelFolder:
    if not folder.is_dir():
        raise ValueError(f"there is no model folder {folder}")
    config = _read_config(folder)
    tensors = read_tensors(folder / "model.safetensors")
    check_finite(tensors, folder / "model.safetensors")
    return ModelFolder(folder, config, tensors, config.pop("imports", None))


def _read_config(folder: Path) -> dict[str, Any]:
    config = read_json(folder / "config.json")
    if config.pop("format", None) != FORMAT:
        raise ValueError(f"{folder} is not a model folder of this lab: config.json has no format {FORMAT!r}")
    return config


def _check_model_folder(folder: Path) -> bool:
    """Raises ValueError unless a folder is a model folder or empty, because replacing it deletes it."""
    try:
        if not folder.is_dir() or any(folder.iterdir()):
            _read_config(folder)
    except ValueError as error:
        raise ValueError(f"{folder} exists and is not a model folder, so it is not replaced: {error}") from error
    return True


def load(path: str | Path, *, device: torch.device | str = "cpu") -> tuple[GPT, Tokenizer]:
    """Reads a model folder, or the model of a run: the final one, or that of its newest checkpoint."""
    path, device = Path(path), device_of(device)
    if (path / "config.json").is_file() or not RunFolder(path).is_run:
        return _from_folder(path, device)
    if (path / "model").is_dir():
        return _from_folder(path / "model", device)
    return _from_checkpoint(RunFolder(path), device)


def _from_folder(path: Path, device: torch.device | str) -> tuple[GPT, Tokenizer]:
    folder, tokenizer = read_dir(path, _read_with_tokenizer)
    with plugins.recorded(folder.imports):
        return _build(path, folder.config, folder.tensors, tokenizer, device)


def _read_with_tokenizer(path: Path) -> tuple[ModelFolder, Tokenizer]:
    folder = load_model(path)
    return folder, Tokenizer.load(folder.file())


def _from_checkpoint(run: RunFolder, device: torch.device | str) -> tuple[GPT, Tokenizer]:
    found, tensors = _newest(run)
    tokenizer = Tokenizer.load(run.path)
    model = entry(run.recipe(), "model", dict, run.path / "run.json")
    config = {**model, "vocab_size": tokenizer.vocab_size}
    with plugins.recorded(run.read().get("imports")):
        return _build(found.path, config, tensors, tokenizer, device)


def _newest(run: RunFolder) -> tuple[checkpoint.Checkpoint, dict[str, torch.Tensor]]:
    for _ in range(ATTEMPTS):
        found, skipped = checkpoint.latest(run.checkpoints)
        if found is None:
            raise ValueError("; ".join([f"the run {run.path} has no model and no complete checkpoint yet", *skipped]))
        try:
            return found, found.model()
        except (ValueError, OSError):
            # The run has pruned it meanwhile and has a newer checkpoint.
            if found.path.exists():
                raise
    raise ValueError(f"the checkpoints of {run.path} are replaced faster than they can be read")


def _build(
    path: Path,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    tokenizer: Tokenizer,
    device: torch.device | str,
) -> tuple[GPT, Tokenizer]:
    tensors = with_vector_gates(tensors)
    try:
        parsed = ModelConfig.from_dict(config)
        # Checked before the blocks are built.
        if parsed.depth > len(tensors):
            raise ValueError(f"its depth is {parsed.depth}, and there are {len(tensors)} tensors")
        with torch.device("meta"):
            model = GPT(parsed)
        check_fit(model.state_dict(), tensors)
    # The sizes are impossible for a tensor.
    except (ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{path}: {error}") from error
    if parsed.vocab_size != tokenizer.vocab_size:
        raise ValueError(
            f"{path}: the model has {parsed.vocab_size} tokens and the tokenizer {tokenizer.vocab_size}; "
            "they do not belong together"
        )
    model.to_empty(device=device)
    model.load_state_dict(tensors)
    return model.eval(), tokenizer
