"""Folders that exist completely or not at all, and tensors in them."""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

SHARED = "shared"


@contextmanager
def whole_folder(final: Path) -> Iterator[Path]:
    """A folder to write into, which gets its final name when all of it is on disk, and vanishes if something fails."""
    settle(final)
    final.parent.mkdir(parents=True, exist_ok=True)
    work = final.parent / f".{final.name}.tmp-{uuid.uuid4().hex[:8]}"
    try:
        work.mkdir()
        yield work
        for path in work.iterdir():
            sync(path)
        sync(work)
        if final.exists():
            # A folder cannot be renamed onto another; `settle` repairs a crash between these two lines.
            final.rename(_aside(final))
        work.rename(final)
        sync(final.parent)
    except BaseException as error:
        shutil.rmtree(work, ignore_errors=True)
        settle(final)
        if isinstance(error, OSError | SafetensorError):
            raise OSError(_errno(error), f"could not write {final}: {_reason(error)}. Nothing was changed.") from error
        raise
    settle(final)


def settle(final: Path) -> None:
    """Ends a replacement that was cut short: the old folder comes back unless the new one has arrived."""
    aside = _aside(final)
    if not aside.exists():
        return
    if final.exists():
        shutil.rmtree(aside)
    else:
        aside.rename(final)


def discard(folder: Path) -> None:
    """Removes a folder, which loses its name first: a removal cut short leaves nothing that looks complete."""
    doomed = folder.parent / f".{folder.name}.tmp-{uuid.uuid4().hex[:8]}"
    folder.rename(doomed)
    shutil.rmtree(doomed)


def unfinished(parent: Path, pattern: str) -> list[Path]:
    """What saves and removals that were killed have left behind."""
    return sorted(parent.glob(f".{pattern}.tmp-*"))


def sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file in the dtypes given; tensors that are one and the same are stored once."""
    unique: dict[str, Tensor] = {}
    shared: dict[str, str] = {}
    first: dict[Any, str] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ValueError(f"expected tensors by name, got {name!r}: {type(tensor).__name__}")
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device and has no values to save")
        key = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and key in first:
            shared[name] = first[key]
            continue
        first[key] = name
        storage = tensor.untyped_storage().data_ptr()
        tensor = tensor.detach().cpu().contiguous()
        # Views of one storage that differ become tensors of their own.
        unique[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    save_file(unique, path, metadata={"format": "pt", SHARED: json.dumps(shared)})


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, or a ValueError that says what is wrong with it."""
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            # Copies, so that the file may be replaced or removed while they live.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            shared = json.loads((file.metadata() or {}).get(SHARED, "{}"))
        return tensors | {name: tensors[source] for name, source in shared.items()}
    except (SafetensorError, OSError, KeyError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a complete safetensors file: {error}") from error


def write_json(path: Path, value: Any) -> None:
    path.write_text(dumps(path.name, value), encoding="utf-8")


def dumps(what: str, value: Any) -> str:
    """JSON, or a ValueError: NaN and tensors are not JSON."""
    try:
        return json.dumps(value, indent=1, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what} cannot be written as JSON: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file, or a ValueError that says what is wrong with it."""
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, expected a JSON object")
    return value


def check_finite(tensors: Mapping[str, Tensor], where: object) -> None:
    """Raises ValueError for a NaN or an infinity in any tensor."""
    if bad := [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]:
        raise ValueError(f"{where}: {len(bad)} tensors have values that are not finite ({', '.join(bad[:3])})")


def _aside(final: Path) -> Path:
    return final.parent / f".{final.name}.old"


def _errno(error: BaseException) -> int:
    if isinstance(error, OSError) and error.errno:
        return error.errno
    # safetensors writes in its own language and reports the number in its message.
    found = re.search(r"os error (\d+)", str(error))
    return int(found[1]) if found else 5


def _reason(error: BaseException) -> str:
    return os.strerror(_errno(error)) if not isinstance(error, OSError) else (error.strerror or str(error))


def write_whole(path: Path, text: str) -> None:
    """A file that has its name only when all of it is on the disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        sync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)
