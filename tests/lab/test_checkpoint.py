"""Checkpoints and model folders: complete or absent, whatever happens."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from temper_lab import io
from temper_lab.optim import Optimizers
from temper_lab.train import checkpoint
from temper_lab.train.checkpoint import latest, rng_state, save, set_rng_state
from temper_lab.train.model_dir import load_model, save_model

MODEL = {"weight": torch.arange(6.0).view(2, 3), "half": torch.ones(3, dtype=torch.bfloat16) / 3}
OPTIMIZER = {"step.weight": torch.tensor(3.0), "exp_avg.weight": torch.randn(2, 3)}
CONFIG = {"depth": 2, "vocab_size": 16, "routing": {"name": "cp", "rank": 4}}


def put(folder: Path, step: int, metrics: dict | None = None, **options: object) -> Path:
    state = {"step": step, "metrics": metrics or {}}
    return save(folder, step, model=MODEL, optimizer=OPTIMIZER, state=state, **options)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def assert_same(given: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert given.keys() == expected.keys()
    for name, tensor in expected.items():
        assert given[name].dtype == tensor.dtype
        assert torch.equal(given[name], tensor)


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    state = {"metrics": {"bpb": 1.25}, "loader": {"shard": 3, "buffer": [1, 2]}, "rng": rng_state()}
    path = save(tmp_path / "run", 123, model=MODEL, optimizer=OPTIMIZER, state=state)
    assert path == tmp_path / "run" / "step-000123"
    found, skipped = latest(tmp_path / "run")
    assert skipped == []
    assert (found.path, found.step, found.state) == (path, 123, state)
    assert_same(found.model(), MODEL)
    assert_same(found.optimizer(), OPTIMIZER)
    assert names(path) == ["manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"]
    assert names(tmp_path / "run") == ["step-000123"]


def test_no_checkpoint_is_not_an_error(tmp_path: Path) -> None:
    assert latest(tmp_path / "nowhere") == (None, [])
    (tmp_path / "notes").mkdir()
    (tmp_path / "step-000009").write_text("a file")
    assert latest(tmp_path) == (None, [])


def test_tied_strided_and_scalar_tensors(tmp_path: Path) -> None:
    table = torch.randn(4, 3)
    tensors = {
        "embedding": table,
        "head": table,
        "transposed": torch.randn(3, 5).T,
        "rows": table[1:3],
        "scalar": torch.tensor(2.0),
        "empty": torch.empty(0, 3),
        "also_empty": torch.empty(0, 3),
        "whole": torch.tensor([2**40]),
    }
    save(tmp_path, 0, model=tensors, optimizer={}, state={})
    loaded = latest(tmp_path)[0].model()
    assert_same(loaded, tensors)
    assert loaded["head"] is loaded["embedding"]
    assert loaded["rows"].data_ptr() != loaded["embedding"].data_ptr()
    assert latest(tmp_path)[0].optimizer() == {}


def test_keep_last_and_keep_best(tmp_path: Path) -> None:
    for step, bpb in ((1, 1.5), (2, 1.1), (3, 1.3), (4, float("1e9")), (5, None)):
        put(tmp_path, step, {} if bpb is None else {"bpb": bpb}, keep_last=2, keep_best="bpb")
    assert names(tmp_path) == ["step-000002", "step-000004", "step-000005"]
    put(tmp_path, 6, {"bpb": 1.0}, keep_last=1, keep_best="bpb")
    assert names(tmp_path) == ["step-000006"]
    put(tmp_path, 7, {"bpb": 2.0}, keep_last=1)
    assert names(tmp_path) == ["step-000007"]


def test_pruning_touches_only_older_checkpoints_of_its_own(tmp_path: Path) -> None:
    put(tmp_path, 900)
    for name in ("step-000001", "notes", "step-best"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.txt").write_text("mine")
    put(tmp_path, 5).joinpath("manifest.json").unlink()
    truncate(put(tmp_path, 6) / "model.safetensors")
    for step in (10, 20, 30):
        put(tmp_path, step, keep_last=1)
    broken = ["step-000005", "step-000006"]
    assert names(tmp_path) == ["notes", "step-000001", *broken, "step-000030", "step-000900", "step-best"]


def test_a_step_can_be_saved_again(tmp_path: Path) -> None:
    put(tmp_path, 1, {"bpb": 2.0})
    put(tmp_path, 1, {"bpb": 1.0})
    assert latest(tmp_path)[0].state["metrics"] == {"bpb": 1.0}
    assert names(tmp_path) == ["step-000001"]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("harm", [Path.unlink, truncate, flip, lambda path: path.write_bytes(b"PAR1")])
def test_a_damaged_checkpoint_is_skipped_with_a_message(tmp_path: Path, name: str, harm) -> None:
    put(tmp_path, 1)
    path = put(tmp_path, 2)
    # The last byte of a JSON file is a newline: the byte before it is the one that matters.
    if name == "manifest.json" and harm is truncate:
        truncate(path / name)
    harm(path / name)
    found, skipped = latest(tmp_path)
    assert found.step == 1
    assert len(skipped) == 1
    assert str(path) in skipped[0]
    assert name in skipped[0]


def test_foreign_and_unfinished_folders_are_skipped_with_messages(tmp_path: Path) -> None:
    put(tmp_path, 1)
    (tmp_path / "step-000002").mkdir()
    (tmp_path / "step-000003").mkdir()
    (tmp_path / "step-000003" / "manifest.json").write_text('{"format": "other"}')
    (tmp_path / "step-000004").mkdir()
    (tmp_path / "step-000004" / "manifest.json").write_text(json.dumps({"format": "temper-checkpoint-1", "files": {}}))
    found, skipped = latest(tmp_path)
    assert found.step == 1
    text = "\n".join(skipped)
    for words in ("manifest.json is incomplete", "format 'other'", "manifest.json is missing"):
        assert words in text


@pytest.mark.parametrize("where", ["tensors", "json", "sync", "rename"])
def test_a_full_disk_keeps_the_previous_checkpoint(tmp_path: Path, monkeypatch, where: str) -> None:
    put(tmp_path, 1)
    before = latest(tmp_path)[0]

    def full(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if where == "tensors":
        # It has written a part when it finds out.
        monkeypatch.setattr(io, "save_file", lambda t, path, **o: (path.write_bytes(b"part"), full()))
    elif where == "json":
        monkeypatch.setattr(Path, "write_text", full)
    elif where == "sync":
        monkeypatch.setattr(os, "fsync", full)
    else:
        monkeypatch.setattr(os, "rename", full)
    with pytest.raises(OSError, match=r"could not write .*step-000002: No space left on device") as caught:
        put(tmp_path, 2)
    monkeypatch.undo()
    assert caught.value.errno == errno.ENOSPC
    assert names(tmp_path) == ["step-000001"]
    assert latest(tmp_path) == (before, [])


def test_a_write_that_really_fails_is_an_os_error(tmp_path: Path) -> None:
    """The system refuses files over 64 kB, so the failure comes out of safetensors itself."""
    script = """
        import resource, signal, sys, torch
        from temper_lab.train.checkpoint import save
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        save(sys.argv[1], 1, model={}, optimizer={}, state={})
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
        try:
            save(sys.argv[1], 2, model={"big": torch.ones(10**6)}, optimizer={}, state={})
        except OSError as error:
            print(error.errno, error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(f"{errno.EFBIG} ")
    assert "step-000002" in done.stdout
    assert names(tmp_path) == ["step-000001"]


def test_a_failed_save_of_an_existing_step_keeps_the_old_one(tmp_path: Path, monkeypatch) -> None:
    put(tmp_path, 1, {"bpb": 2.0})
    rename, calls = os.rename, []

    def third_fails(path: Path, target: Path) -> None:
        # Onto the old folder, which is refused; the old one aside; the new one into its place.
        calls.append(path)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "full")
        rename(path, target)

    monkeypatch.setattr(os, "rename", third_fails)
    monkeypatch.setattr(io, "_exchange", lambda one, other: False)
    with pytest.raises(OSError, match="full"):
        put(tmp_path, 1, {"bpb": 1.0})
    assert names(tmp_path) == ["step-000001"]
    assert latest(tmp_path)[0].state["metrics"] == {"bpb": 2.0}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"state": {"loss": float("nan")}}, "state cannot be written as JSON"),
        ({"state": {"tensor": torch.ones(1)}}, "state cannot be written as JSON"),
        ({"model": {"a": [1.0]}}, "expected tensors by name"),
        ({"model": {"a": torch.empty(2, device="meta")}}, "meta device"),
        ({"step": -1}, "step is -1"),
        ({"keep_last": 0}, "keep_last is 0"),
    ],
)
def test_save_refuses_what_it_cannot_keep(tmp_path: Path, options: dict, words: str) -> None:
    arguments = {"step": 2, "model": MODEL, "optimizer": OPTIMIZER, "state": {}} | options
    with pytest.raises(ValueError, match=words):
        save(tmp_path, arguments.pop("step"), **arguments)
    assert names(tmp_path) == []


SAVE_LOOP = """
    import sys, torch
    from temper_lab.train.checkpoint import latest, save
    found, _ = latest(sys.argv[1])
    step = found.step if found else 0
    print("ready", flush=True)
    while True:
        step += 1
        tensors = {f"w{i}": torch.full((500, 200), float(step)) for i in range(4)}
        save(sys.argv[1], step, model=tensors, optimizer=tensors, state={"step": step, "metrics": {"bpb": 1 / step}})
        print(step, flush=True)
"""


def test_sigkill_in_the_middle_of_saves_always_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    chance = random.Random(0)
    reached = 0
    for saves in (0, 1, 1, 2, 3):
        with subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(SAVE_LOOP), str(tmp_path)], stdout=subprocess.PIPE, text=True
        ) as worker:
            assert worker.stdout.readline() == "ready\n"
            # By the clock alone, a busy machine could be killed before it ever saved.
            start = time.monotonic()
            told = [int(worker.stdout.readline()) for _ in range(saves)]
            time.sleep(chance.uniform(0, 2) * (time.monotonic() - start) / saves if saves else 0.02)
            worker.send_signal(signal.SIGKILL)
            told += [int(line) for line in worker.stdout.read().split()]
        found, _ = latest(tmp_path)
        # What was reported as saved is there; at most the save after it is there as well.
        reached = max([reached, *told])
        if found is None:
            assert reached == 0
            continue
        assert found.step in (reached, reached + 1)
        reached = found.step
        assert found.state["step"] == found.step
        for tensors in (found.model(), found.optimizer()):
            assert len(tensors) == 4
            assert all((tensor == found.step).all() for tensor in tensors.values())
    assert reached > 0


def test_resume_from_disk_is_bit_exact(tmp_path: Path) -> None:
    def make(seed: int) -> tuple[nn.Module, Optimizers]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8), nn.Dropout(0.2))
        return model, Optimizers.build(model, batch_tokens=2**14, width=8)

    def steps(model: nn.Module, optimizers: Optimizers, indices: range) -> list[float]:
        losses = []
        for index in indices:
            loss = model(torch.randint(11, (5, 3))).square().mean() * (1 + random.random() + numpy.random.rand())
            loss.backward()
            losses += [loss.item(), optimizers.step(index, 10)]
        return losses

    model, optimizers = make(0)
    steps(model, optimizers, range(4))
    tensors, description = optimizers.state_dict()
    state = {"optimizer": description, "rng": rng_state(), "next": 4}
    save(tmp_path, 4, model=model.state_dict(), optimizer=tensors, state=state)
    expected = steps(model, optimizers, range(4, 9))

    other, resumed = make(1)
    steps(other, resumed, range(2))
    found, _ = latest(tmp_path)
    other.load_state_dict(found.model())
    resumed.load_state_dict(found.optimizer(), found.state["optimizer"])
    set_rng_state(found.state["rng"])
    assert steps(other, resumed, range(found.state["next"], 9)) == expected
    assert_same(other.state_dict(), model.state_dict())
    assert_same(resumed.state_dict()[0], optimizers.state_dict()[0])


def test_rng_state_goes_through_json() -> None:
    random.gauss(0, 1)
    numpy.random.standard_normal()
    state = json.loads(json.dumps(rng_state()))
    draws = [(random.gauss(0, 1), numpy.random.standard_normal(), torch.randn(3).tolist()) for _ in range(3)]
    set_rng_state(state)
    assert [(random.gauss(0, 1), numpy.random.standard_normal(), torch.randn(3).tolist()) for _ in range(3)] == draws
    for bad in ({}, {**state, "torch": "AAAA"}, {**state, "python": [3, [1], None]}, {**state, "numpy": [1]}):
        with pytest.raises(ValueError, match="not the state of random"):
            set_rng_state(bad)


def test_model_folder_round_trip(tmp_path: Path) -> None:
    tokenizer = tmp_path / "trained.json"
    tokenizer.write_text('{"vocab": {}}')
    folder = save_model(tmp_path / "model", CONFIG, MODEL, {"tokenizer.json": tokenizer, "notes.md": "hello"})
    assert names(folder) == ["config.json", "model.safetensors", "notes.md", "tokenizer.json"]
    loaded = load_model(folder)
    assert loaded.config == CONFIG
    assert_same(loaded.tensors, MODEL)
    assert loaded.file().read_text() == '{"vocab": {}}'
    # A second save replaces the first, the tokenizer it does not bring included.
    save_model(folder, {**CONFIG, "depth": 3}, MODEL)
    loaded = load_model(folder)
    assert loaded.config["depth"] == 3
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        loaded.file()
    assert names(tmp_path) == ["model", "trained.json"]


def test_save_model_replaces_nothing_but_model_folders(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="not a model folder, so it is not replaced"):
        save_model(tmp_path, CONFIG, MODEL)
    assert names(tmp_path) == ["thesis.txt"]
    (tmp_path / "empty").mkdir()
    assert load_model(save_model(tmp_path / "empty", CONFIG, MODEL)).config == CONFIG


def test_save_model_refuses_bad_content_and_keeps_the_old(tmp_path: Path, monkeypatch) -> None:
    folder = save_model(tmp_path / "model", CONFIG, MODEL)
    bad = [
        ({**CONFIG, "format": "x"}, MODEL, {}, "entry 'format'"),
        ({"x": {1, 2}}, MODEL, {}, "config cannot be written"),
        (CONFIG, {"w": torch.tensor([1.0, float("inf")])}, {}, r"not finite \(w\)"),
        (CONFIG, MODEL, {"../x": "y"}, "not the name of a file"),
        (CONFIG, MODEL, {"config.json": "y"}, "not the name of a file"),
    ]
    for config, tensors, others, words in bad:
        with pytest.raises(ValueError, match=words):
            save_model(folder, config, tensors, others)
    with pytest.raises(OSError, match="could not write"):
        save_model(folder, {}, MODEL, {"tokenizer.json": tmp_path / "missing.json"})
    assert load_model(folder).config == CONFIG
    assert names(tmp_path) == ["model"]


def test_load_model_says_what_is_wrong(tmp_path: Path) -> None:
    def model() -> Path:
        shutil.rmtree(tmp_path / "model", ignore_errors=True)
        return save_model(tmp_path / "model", CONFIG, MODEL)

    def refused(words: str) -> None:
        with pytest.raises(ValueError, match=words):
            load_model(tmp_path / "model")

    refused("there is no model folder")
    (model() / "config.json").unlink()
    refused(r"config\.json is missing")
    (model() / "config.json").write_text("{")
    refused(r"config\.json is not JSON")
    (model() / "config.json").write_bytes(b"\xff\xfe")
    refused(r"config\.json is not UTF-8 text")
    (model() / "config.json").write_text("[1]")
    refused("holds a list")
    (model() / "config.json").write_text('{"model_type": "gpt2"}')
    refused("not a model folder of this lab")
    (model() / "model.safetensors").unlink()
    refused(r"model\.safetensors is missing")
    truncate(model() / "model.safetensors")
    refused("not a complete safetensors file")
    (model() / "model.safetensors").write_bytes(b"")
    refused("not a complete safetensors file")
    torch.save(MODEL, model() / "model.safetensors")
    refused("not a complete safetensors file")
    save_file(MODEL, model() / "model.safetensors", metadata={"shared": '{"a": "b"}'})
    refused("not a complete safetensors file")
    save_file({"w": torch.tensor([float("nan")])}, model() / "model.safetensors")
    refused(r"not finite \(w\)")
    # A plain safetensors file of somebody else is fine if the config is ours.
    save_file(MODEL, model() / "model.safetensors")
    assert_same(load_model(tmp_path / "model").tensors, MODEL)


def test_nothing_here_unpickles() -> None:
    folder = Path(checkpoint.__file__).parent
    source = "\n".join(path.read_text() for path in folder.glob("*.py"))
    assert "import pickle" not in source
    assert "torch.load" not in source
    assert "torch.save" not in source
