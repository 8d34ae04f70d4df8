"""Sharded tensors on disk: every process writes its own part, and any number of processes reads them back.

`torch.distributed.checkpoint` plans who writes and who reads which part. Its own files are pickled, and unpickling can
run code; these are safetensors and JSON:

    shards.json               dtype and shape of every tensor, and the file of each of its chunks
    shard-00000.safetensors   the chunks that process 0 wrote
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import (
    CheckpointException,
    DefaultLoadPlanner,
    DefaultSavePlanner,
    Metadata,
    StorageReader,
    StorageWriter,
    TensorStorageMetadata,
    async_save,
    load,
)
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import WriteResult

from temper.registry import is_int
from temper_lab.io import FileError, brief, entry, fsync, open_tensors, read_json, write_json, write_tensors

FORMAT = "temper-shards-1"
INDEX = "shards.json"
FILE = re.compile(r"shard-\d{5,}\.safetensors")
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)
}
# A folder to write into, and the fingerprints of the files that are there already.
Opened = tuple[Path, dict[str, Any]]


class Saving:
    """A checkpoint that is being written while training goes on."""

    def __init__(self, future: Future[Any], opened: ExitStack) -> None:
        self._future, self._opened = future, opened

    def wait(self) -> None:
        """Returns when every process has written its part and the folder has its name, or raises why it has not."""
        try:
            self._future.result()
        except CheckpointException as failure:
            error = next(iter(failure.failures.values()))[0]
            # Through the folder's own context, which removes what was written.
            with self._opened:
                raise error from None
        except BaseException as error:
            with self._opened:
                raise error


def save(
    tensors: Mapping[str, Tensor],
    folder: AbstractContextManager[Opened],
    fingerprint: Callable[[Path], Any],
    group: dist.ProcessGroup | None,
) -> Saving:
    """Copies the tensors of this process to memory and writes them in the background; every process has to call this.

    Args:
        folder: entered by the first process, and left when all have written; the others see the same file system.
        fingerprint: called by each process with the file that it has written.
        group: gloo, and used by nothing else: it works while training exchanges gradients. None without any group.
    """
    opened = ExitStack()
    future = async_save(
        dict(tensors),
        storage_writer=_Writer(folder, opened, fingerprint),
        planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        process_group=group,
        async_stager=BlockingAsyncStager(cache_staged_state_dict=False),
    )
    assert isinstance(future, Future)
    return Saving(future, opened)


class _Writer(StorageWriter):
    def __init__(
        self, folder: AbstractContextManager[Opened], opened: ExitStack, fingerprint: Callable[[Path], Any]
    ) -> None:
        self._folder, self._opened, self._fingerprint = folder, opened, fingerprint

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._work, self._files = self._opened.enter_context(self._folder)
        names = [self._work / f"shard-{number:05d}.safetensors" for number in range(len(plans))]
        return [replace(plan, storage_data=str(name)) for plan, name in zip(plans, names, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        path = Path(plan.storage_data)
        chunks = {_key(item.index.fqn, item.index.offset or ()): planner.resolve_data(item) for item in plan.items}
        written: list[WriteResult] = []
        if chunks:
            write_tensors(path, chunks)  # type: ignore[arg-type]
            # Only this machine knows what it has not sent to the disk yet.
            fsync(path)
            about = (path.name, self._fingerprint(path))
            written = [WriteResult(item.index, 0, about) for item in plan.items]
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result(written)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files: dict[str, str] = {}
        for result in (result for part in results for result in part):
            name, self._files[name] = result.storage_data
            files[_key(result.index.fqn, result.index.offset or ())] = name
        tensors = {}
        for name, about in metadata.state_dict_metadata.items():
            assert isinstance(about, TensorStorageMetadata)
            tensors[name] = {
                "dtype": str(about.properties.dtype).removeprefix("torch."),
                "shape": list(about.size),
                "chunks": [
                    [list(chunk.offsets), list(chunk.sizes), files[_key(name, chunk.offsets)]] for chunk in about.chunks
                ],
            }
        write_json(self._work / INDEX, {"format": FORMAT, "tensors": tensors})
        self._opened.close()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


def _key(name: str, offsets: Iterable[int]) -> str:
    """The name of a chunk in its file."""
    return f"{name}@{','.join(map(str, offsets))}"


def read(folder: Path, part: str, like: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The tensors whose names begin with `part.`, without it; a FileError says what is wrong with the files.

    Args:
        like: tensors by name; those that are sharded are read as shards, whoever wrote them. Others are read whole.
    """
    index, like = _Index.read(folder), like or {}
    targets: dict[str, Any] = {}
    for name, about in index.tensors.items():
        model = like.get(name.removeprefix(f"{part}."))
        if name.startswith(f"{part}."):
            dtype = about.properties.dtype
            if model is not None and model.shape == about.size:
                targets[name] = torch.empty_like(model, dtype=dtype)
            else:
                targets[name] = torch.empty(about.size, dtype=dtype)
    with warnings.catch_warnings():
        # Each process reads for itself, which is what the warning is about.
        warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)
        try:
            planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            load(targets, storage_reader=_Reader(folder, index), planner=planner, no_dist=True)
        except CheckpointException as failure:
            error = next(iter(failure.failures.values()))[0]
            raise FileError(f"{folder} cannot be read: {error}") from error
    return {name.removeprefix(f"{part}."): tensor for name, tensor in targets.items()}


class _Reader(StorageReader):
    def __init__(self, folder: Path, index: _Index) -> None:
        self._folder, self._index = folder, index

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(dict(self._index.tensors))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        by_file: dict[str, list[Any]] = {}
        for item in plan.items:
            key = _key(item.storage_index.fqn, item.storage_index.offset or ())
            by_file.setdefault(self._index.files[key], []).append((key, item))
        for name, items in by_file.items():
            with open_tensors(self._folder / name) as file:
                for key, item in items:
                    ends = zip(item.storage_offsets, item.lengths, strict=True)
                    rows = tuple(slice(start, start + length) for start, length in ends)
                    chunk = file.get_slice(key)[rows] if rows else file.get_tensor(key)
                    target = planner.resolve_tensor(item).detach()
                    if target.shape != chunk.shape:
                        raise FileError(f"{key} is {tuple(chunk.shape)} there, expected {tuple(target.shape)}")
                    target.copy_(chunk)
                    planner.commit_tensor(item, target)
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


@dataclass(frozen=True)
class _Index:
    """The content of `shards.json`.

    Args:
        files: the file of every chunk, by its name there.
    """

    tensors: Mapping[str, TensorStorageMetadata]
    files: Mapping[str, str]

    @classmethod
    def read(cls, folder: Path) -> _Index:
        path = folder / INDEX
        content = read_json(path)
        if content.get("format") != FORMAT:
            raise FileError(f"{path} has format {brief(content.get('format'))}, expected {FORMAT!r}")
        tensors: dict[str, TensorStorageMetadata] = {}
        files: dict[str, str] = {}
        total = 0
        for name, about in entry(content, "tensors", dict, path).items():
            where = f"{path}: {name}"
            dtype, shape = DTYPES.get(entry(about, "dtype", str, where)), entry(about, "shape", list, where)
            chunks = entry(about, "chunks", list, where)
            if dtype is None or not _are_sizes(shape) or not all(_is_chunk(chunk, shape) for chunk in chunks):
                raise FileError(f"{where} is {brief(about)}; expected a dtype, a shape and chunks within it")
            if not _are_whole(chunks, shape):
                raise FileError(f"{where}: its chunks are not all of it")
            total += math.prod(shape) * dtype.itemsize
            parts = [ChunkStorageMetadata(torch.Size(start), torch.Size(size)) for start, size, _ in chunks]
            tensors[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), parts)
            files |= {_key(name, start): file for start, _, file in chunks}
        # Before memory is taken for all that it says.
        if missing := [name for name in set(files.values()) if not (folder / name).is_file()]:
            raise FileError(f"{folder} has no {missing[0]}, which {INDEX} names")
        if total > sum((folder / name).stat().st_size for name in set(files.values())):
            raise FileError(f"{path} speaks of more numbers than its files have")
        return cls(tensors, files)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(is_int(value) and 0 <= value < 1 << 62 for value in values)


def _is_chunk(chunk: Any, shape: list[int]) -> bool:
    if not isinstance(chunk, list) or len(chunk) != 3:
        return False
    start, size, name = chunk
    are_sizes = _are_sizes(start) and _are_sizes(size) and len(start) == len(size) == len(shape)
    # A name that leads nowhere else.
    return are_sizes and all(a + b <= c for a, b, c in zip(start, size, shape, strict=True)) and _is_file_name(name)


def _are_whole(chunks: list[Any], shape: list[int]) -> bool:
    """Whether the chunks, one after the other along the first dimension, are all of a tensor."""
    row = 0
    for start, size, _ in sorted((chunk for chunk in chunks if math.prod(chunk[1])), key=lambda chunk: chunk[0]):
        if start[:1] not in ([], [row]) or any(start[1:]) or size[1:] != shape[1:]:
            return False
        row += size[0] if size else 1
    # A scalar is one row; where any size is zero there is nothing to read.
    return row == (shape[0] if shape else 1) or math.prod(shape) == 0


def _is_file_name(name: Any) -> bool:
    return isinstance(name, str) and FILE.fullmatch(name) is not None
