"""Sharded checkpoints: written in the background, whole or absent, and read without unpickling anything."""

from __future__ import annotations

import errno
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import kills
import pytest
import torch
from torch import Tensor

from temper_lab.io import FileError, dumps
from temper_lab.train import checkpoint, shards

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

WHOLE = {
    "model.weight": torch.arange(15.0).view(5, 3),
    "model.half": torch.ones(4, dtype=torch.bfloat16) / 3,
    "optimizer.step.weight": torch.tensor(7.0),
    "optimizer.exp_avg.weight": torch.randn(5, 3, dtype=torch.float64),
}


def tensors(value: float = 0.0) -> dict[str, Tensor]:
    """The tensors plus a number."""
    return {name: tensor + value for name, tensor in WHOLE.items()}


def save(folder: Path, step: int, given: dict[str, Tensor]) -> shards.Saving:
    """Begins to save as the only process; `test_train` has several."""
    opening = checkpoint.writing(folder, step, {"step": step}, keep_last=1)
    return shards.save(given, opening, checkpoint.fingerprint, None)


def assert_holds(found: checkpoint.Checkpoint, value: float) -> None:
    read = {f"model.{name}": tensor for name, tensor in found.model().items()}
    read |= {f"optimizer.{name}": tensor for name, tensor in found.optimizer().items()}
    expected = tensors(value)
    assert read.keys() == expected.keys()
    for name, tensor in expected.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


def test_what_is_saved_is_what_was_there_when_it_began(tmp_path, monkeypatch):
    mine = tensors()
    # Long enough for the next step, which changes every tensor in place.
    write = shards.write_tensors

    def late(path: Path, chunks: dict[str, Tensor]) -> None:
        is_changed.result(10)
        write(path, chunks)

    is_changed: shards.Future[None] = shards.Future()
    monkeypatch.setattr(shards, "write_tensors", late)
    saving = save(tmp_path, 3, mine)
    for tensor in mine.values():
        tensor.add_(1)
    assert checkpoint.latest(tmp_path) == (None, [])
    is_changed.set_result(None)
    saving.wait()
    found, skipped = checkpoint.latest(tmp_path)
    assert (found.step, found.state, skipped) == (3, {"step": 3}, [])

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("something was unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    assert_holds(found, 0)


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    save(tmp_path, 1, tensors()).wait()

    def full(path: Path, chunks: dict[str, Tensor]) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shards, "write_tensors", full)
    saving = save(tmp_path, 2, tensors(1))
    with pytest.raises(OSError, match=r"could not write .*step-000002: No space left.* Nothing was changed"):
        saving.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    assert_holds(checkpoint.latest(tmp_path)[0], 0)


def test_killed_at_any_call_it_leaves_the_old_state_or_the_new(tmp_path):
    def action(folder: Path) -> Callable[[], int]:
        def run() -> int:
            for step in (1, 2):
                save(folder, step, tensors(step)).wait()
            return 0

        return run

    code, total = kills.run(action(tmp_path / "whole"), tmp_path)
    assert code == 0
    steps = []
    for place in range(total // 2, total + 1):
        folder = tmp_path / str(place)
        assert kills.run(action(folder), tmp_path, die_at=place)[0] == 9
        found, skipped = checkpoint.latest(folder)
        assert skipped == []
        assert_holds(found, found.step)
        steps.append(found.step)
    assert set(steps) == {1, 2}
    assert steps == sorted(steps)


TENSOR = {"dtype": "float32", "shape": [5, 3], "chunks": [[[0, 0], [5, 3], "shard-00000.safetensors"]]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"chunks": [[[0, 0], [5, 3], "../shard-00000.safetensors"]]}, "expected a dtype, a shape and chunks"),
        ({"chunks": [[[0, 0], [5, 3], "shard-00007.safetensors"]]}, "has no shard-00007"),
        ({"chunks": [[[1, 0], [5, 3], "shard-00000.safetensors"]]}, "chunks within it"),
        ({"chunks": [[[0, 0], [4, 3], "shard-00000.safetensors"]]}, "not all of it"),
        ({"chunks": []}, "not all of it"),
        # As many numbers as there should be, but the last row is missing.
        (
            {"chunks": [[[row, 0], [rows, 3], "shard-00000.safetensors"] for row, rows in ((0, 3), (2, 2))]},
            "not all of it",
        ),
        ({"chunks": 3}, "expected a list"),
        ({"dtype": "object"}, "expected a dtype"),
        ({"shape": [5, -3]}, "expected a dtype"),
        ({"shape": [1 << 40], "chunks": [[[0], [1 << 40], "shard-00000.safetensors"]]}, "more numbers than its files"),
        ({"shape": [6, 3], "chunks": [[[0, 0], [6, 3], "shard-00000.safetensors"]]}, "expected"),
    ],
)
def test_an_index_that_is_wrong(change, words, tmp_path):
    shards.write_tensors(tmp_path / "shard-00000.safetensors", {"model.weight@0,0": torch.ones(5, 3)})
    (tmp_path / shards.INDEX).write_text(
        dumps("the index", {"format": shards.FORMAT, "tensors": {"model.weight": TENSOR | change}})
    )
    with pytest.raises(FileError, match=words):
        shards.read(tmp_path, "model")


def test_a_shard_that_changed_is_noticed(tmp_path):
    save(tmp_path, 1, tensors()).wait()
    path = tmp_path / "step-000001" / "shard-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    found, skipped = checkpoint.latest(tmp_path)
    assert found is None
    assert "shard-00000.safetensors is not what was saved" in skipped[0]
    # What the manifest does not name is not read.
    manifest = tmp_path / "step-000001" / "manifest.json"
    content = json.loads(manifest.read_text())
    del content["files"]["shard-00000.safetensors"]
    manifest.write_text(json.dumps(content))
    assert "manifest.json is incomplete" in checkpoint.latest(tmp_path)[1][0]
