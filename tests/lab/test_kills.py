"""Killed at every call to the file system: the old state or the new one, and the same bytes in the end."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import kills
import pytest
from processes import error_of, start

from temper_lab import io
from temper_lab.cli import main
from temper_lab.train import checkpoint
from temper_lab.train.model_dir import load
from temper_lab.train.run_dir import RunFolder

STEPS = ["--train.steps", "3", "--train.val-every", "1", "--train.val-batches", "1", "--train.save-every", "1"]
STEPS += ["--train.keep-best", "--train.keep-last", "1", "--train.sample-tokens", "0"]


def leftovers(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if ".tmp-" in path.name]


def places(total: int, sample: int, seed: int) -> list[int]:
    """All places, or some of them."""
    return (
        sorted(random.Random(seed).sample(range(1, total + 1), min(sample, total))) if sample else range(1, total + 1)
    )


def train(recipe: Path, out: Path) -> Callable[[], int]:
    """Begins a run or goes on with it, whichever is there to do."""

    def action() -> int:
        if RunFolder(out).is_run:
            return main(["train", "--out", str(out), "--resume"])
        return main(["train", "--recipe", str(recipe), "--out", str(out), *STEPS])

    return action


def same_bytes(one: Path, other: Path) -> bool:
    names = ("metrics.jsonl", "model/model.safetensors", "model/config.json", "best/model.safetensors")
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


def check_train(tiny: Path, folder: Path, sample: int) -> None:
    whole = folder / "whole"
    code, total = kills.run(train(tiny, whole), folder)
    assert code == 0
    assert total > 100
    for place in places(total, sample, 0):
        out = folder / f"run-{place}"
        code, _ = kills.run(train(tiny, out), folder, die_at=place)
        assert code == 9, place
        # Whatever has its name is whole.
        for name in ("model", "best"):
            if (out / name).exists():
                load(out / name)
        for path in out.glob("checkpoints/step-*"):
            checkpoint.verify(path)
        assert kills.run(train(tiny, out), folder)[0] == 0, place
        assert same_bytes(out, whole), place
        assert sorted(os.listdir(out / "checkpoints")) == sorted(os.listdir(whole / "checkpoints")), place
        assert leftovers(out) == [], place
        shutil.rmtree(out)


def test_a_kill_before_the_last_checkpoint_is_pruned(tiny, tmp_path, monkeypatch):
    prune = checkpoint.prune

    def dying(folder: Path, step: int, **kept: object) -> None:
        prune(folder, step, **kept) if step < 3 else os._exit(9)

    monkeypatch.setattr(checkpoint, "prune", dying)
    assert kills.run(train(tiny, tmp_path / "run"), tmp_path)[0] == 9
    assert len(os.listdir(tmp_path / "run" / "checkpoints")) > 1
    monkeypatch.undo()
    assert kills.run(train(tiny, tmp_path / "run"), tmp_path)[0] == 0
    assert os.listdir(tmp_path / "run" / "checkpoints") == ["step-000003"]


def test_training_killed_at_some_calls(tiny, tmp_path):
    check_train(tiny, tmp_path, 6)


def test_training_killed_at_some_calls_where_names_cannot_be_exchanged(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(io, "_exchange", lambda one, other: False)
    check_train(tiny, tmp_path, 3)


@pytest.mark.slow
def test_training_killed_at_every_call(tiny, tmp_path):
    check_train(tiny, tmp_path, 0)


@pytest.fixture(scope="module", autouse=True)
def models(tiny, tmp_path_factory) -> Path:
    """Two models; and whatever is imported for them need not be imported by every process that is killed."""
    import temper_lab.compress
    import temper_lab.interop.export
    import temper_lab.interop.hf
    import temper_lab.interop.upcycle  # noqa: F401

    root = tmp_path_factory.mktemp("models")
    for preset in ("residual", "mhc"):
        words = ["train", "--recipe", str(tiny), "--out", str(root / preset), "--model.preset", preset, *STEPS]
        assert main(words) == 0
    return root


COMMANDS = {
    "export": ["export", "--model", "{models}/residual"],
    "upcycle": ["upcycle", "--model", "{models}/residual", "--streams", "2", "--preset", "temper-cp"],
    "compress": ["compress", "--model", "{models}/mhc", "--rank", "1", "--to", "cp", "--batches", "1"],
}


def check_command(name: str, models: Path, folder: Path, sample: int) -> None:
    """A folder that is there is complete, and the same command makes it if it is not."""

    def action(out: Path) -> Callable[[], int]:
        return lambda: main([*(word.format(models=models) for word in COMMANDS[name]), "--out", str(out)])

    def contents(out: Path) -> dict[str, bytes]:
        # Seconds are in the report of a compression, and no two are alike.
        return {path.name: path.read_bytes() for path in out.iterdir() if path.name != "compress.json"}

    (folder / "a").mkdir()
    code, total = kills.run(action(folder / "a" / "out"), folder)
    assert code == 0
    whole = contents(folder / "a" / "out")
    for place in places(total, sample, 1):
        out = folder / str(place) / "out"
        out.parent.mkdir()
        assert kills.run(action(out), folder, die_at=place)[0] == 9
        if not out.exists():
            assert kills.run(action(out), folder)[0] == 0
            assert leftovers(out.parent) == []
        assert contents(out) == whole, place


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_killed_at_some_calls(name, models, tmp_path):
    check_command(name, models, tmp_path, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_killed_at_every_call(name, models, tmp_path):
    check_command(name, models, tmp_path, 0)


@pytest.mark.slow
def test_a_study_killed_at_every_fifth_call(tiny, tmp_path):
    def action(out: Path) -> Callable[[], int]:
        words = [
            "compare",
            "--recipe",
            str(tiny),
            "--out",
            str(out),
            "--methods",
            "residual,temper-cp",
            "--streams",
            "2",
        ]
        return lambda: main([*words, "--seeds", "0", "--jobs", "1", "--no-cost", *STEPS[:-2]])

    code, total = kills.run(action(tmp_path / "whole"), tmp_path)
    assert code == 0
    keys = os.listdir(tmp_path / "whole" / "runs")
    assert len(keys) == 2
    for place in range(1, total + 1, 5):
        out = tmp_path / f"study-{place}"
        assert kills.run(action(out), tmp_path, die_at=place)[0] == 9
        assert kills.run(action(out), tmp_path)[0] == 0
        assert all(same_bytes(out / "runs" / key, tmp_path / "whole" / "runs" / key) for key in keys)
        assert leftovers(out) == []
        shutil.rmtree(out)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_torchrun_brings_a_run_back_that_lost_a_process(seed, tiny, tmp_path_factory, tmp_path):
    rng = random.Random(seed)
    steps = ["--train.steps", "30", "--train.save-every", "2", "--train.val-every", "10", "--train.sample-tokens", "0"]
    # Copied, with checkpoints of whole tensors; or sharded, with shards that are written while training goes on.
    parallel = ("ddp", "fsdp")[seed % 2]
    steps += ["--train.parallel", parallel]

    def torchrun(out: Path) -> subprocess.Popen:
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "3"]
        return start(*words, "-m", "temper_lab", "train", "--recipe", str(tiny), "--out", str(out), *steps)

    whole = tmp_path_factory.getbasetemp() / f"torchrun-{parallel}"
    if not whole.exists():
        process = torchrun(whole)
        error_of(process)
        assert process.returncode == 0
    out, wanted = tmp_path / "run", rng.randint(0, 25)
    process = torchrun(out)
    while not (out / "metrics.jsonl").is_file() or (out / "metrics.jsonl").read_text().count("\n") < wanted:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.005)
    time.sleep(rng.uniform(0, 0.1))
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(rng.choice(workers)), signal.SIGKILL)
    error = error_of(process)
    assert process.returncode == 0, error
    assert "resumed from" in error or "holds" not in error
    assert (out / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert (out / "model" / "model.safetensors").read_bytes() == (whole / "model" / "model.safetensors").read_bytes()
    assert leftovers(out) == []
