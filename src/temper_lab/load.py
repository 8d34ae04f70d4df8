"""A trained model and its tokenizer, from a model folder or from the folder of a run."""

from __future__ import annotations

from pathlib import Path

import torch

from temper.gates import with_vector_gates
from temper_lab import checkpoint
from temper_lab.distributed import check_fit, device_of
from temper_lab.io import ATTEMPTS, entry, read_dir
from temper_lab.model import GPT, ModelConfig
from temper_lab.run import RunFolder
from temper_lab.tokenizer import Tokenizer


def load(path: str | Path, *, device: torch.device | str = "cpu") -> tuple[GPT, Tokenizer]:
    """Reads a model folder, or the model of a run: the final one, or that of its newest checkpoint."""
    path, device = Path(path), device_of(device)
    if (path / "config.json").is_file() or not RunFolder(path).is_run:
        return _from_folder(path, device)
    if (path / "model").is_dir():
        return _from_folder(path / "model", device)
    return _from_checkpoint(RunFolder(path), device)


def _from_folder(path: Path, device: torch.device | str) -> tuple[GPT, Tokenizer]:
    folder, tokenizer = read_dir(path, _read_folder)
    return _build(path, folder.config, folder.tensors, tokenizer, device)


def _read_folder(path: Path) -> tuple[checkpoint.ModelFolder, Tokenizer]:
    folder = checkpoint.load_model(path)
    return folder, Tokenizer.load(folder.file())


def _from_checkpoint(run: RunFolder, device: torch.device | str) -> tuple[GPT, Tokenizer]:
    found, tensors = _newest(run)
    tokenizer = Tokenizer.load(run.path)
    model = entry(run.recipe(), "model", dict, run.path / "run.json")
    config = {**model, "vocab_size": tokenizer.vocab_size}
    return _build(found.path, config, tensors, tokenizer, device)


def _newest(run: RunFolder) -> tuple[checkpoint.Checkpoint, dict[str, torch.Tensor]]:
    for _ in range(ATTEMPTS):
        found, skipped = checkpoint.latest(run.checkpoints)
        if found is None:
            raise ValueError("; ".join([f"the run {run.path} has no model and no complete checkpoint yet", *skipped]))
        try:
            return found, found.model()
        except (ValueError, OSError):
            # The run has pruned it meanwhile, and has a newer one.
            if found.path.exists():
                raise
    raise ValueError(f"the checkpoints of {run.path} are replaced faster than they can be read")


def _build(
    path: Path, config: dict, tensors: dict[str, torch.Tensor], tokenizer: Tokenizer, device: torch.device | str
) -> tuple[GPT, Tokenizer]:
    tensors = with_vector_gates(tensors)
    try:
        parsed = ModelConfig.from_dict(config)
        # Before so many blocks are built: each has several tensors.
        if parsed.depth > len(tensors):
            raise ValueError(f"its depth is {parsed.depth}, and there are {len(tensors)} tensors")
        with torch.device("meta"):
            model = GPT(parsed)
        check_fit(model.state_dict(), tensors)
    # Sizes that no tensor can have.
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
