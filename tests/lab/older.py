"""Folders as older versions wrote them."""

from pathlib import Path

from safetensors.torch import load_file, save_file


def with_scalar_gates(folder: Path) -> None:
    """Stores the gates of a folder as scalars, as they were once."""
    for path in folder.glob("*.safetensors"):
        tensors = {key: value.reshape(()) if key.endswith(".gate") else value for key, value in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})
