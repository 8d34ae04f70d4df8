"""Training runs: they learn, survive everything, and one process or two make no difference."""

import errno
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from processes import error_of, start
from safetensors.torch import load_file

import temper
from temper_lab import io as files
from temper_lab.cli import main
from temper_lab.console import Bar
from temper_lab.recipe import Recipe
from temper_lab.train import checkpoint, run_dir
from temper_lab.train.model_dir import load
from temper_lab.train.run_dir import RunFolder

MIXING = ("res_off_diagonal", "composite_gain", "composite_backward_gain", "stream_similarity")


def command(recipe: Path, out: Path, *options: str) -> list[str]:
    return ["train", "--recipe", str(recipe), "--out", str(out), *options]


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in run_dir.read_log(out / "metrics.jsonl")]


def wait_for_step(out: Path, step: int, process: subprocess.Popen) -> None:
    end = time.monotonic() + 120
    while not (out / "metrics.jsonl").is_file() or len(run_dir.read_log(out / "metrics.jsonl")) < step:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < end
        time.sleep(0.005)


def assert_same_run(given: Path, expected: Path) -> None:
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (given / name).read_bytes() == (expected / name).read_bytes()
    mine, theirs = (load_file(out / "model" / "model.safetensors") for out in (given, expected))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.fixture(scope="module")
def unbroken(tiny, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "unbroken"
    assert main(command(tiny, out)) == 0
    return out


def test_what_a_run_leaves_behind(unbroken, tiny, corpus_folder):
    names = {path.name for path in unbroken.iterdir() if path.name != ".lock"}
    assert names == {
        "checkpoints",
        "metrics.jsonl",
        "model",
        "run.json",
        "samples.jsonl",
        "timing.jsonl",
        "tokenizer.json",
    }
    lines = run_dir.read_log(unbroken / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert [line["step"] for line in lines if "val_bpb" in line] == [4, 8, 12]
    assert set(lines[0]) == {"step", "loss", "lr", "grad_norm"}
    assert sorted(path.name for path in (unbroken / "checkpoints").iterdir()) == ["step-000009", "step-000012"]
    assert {path.name for path in (unbroken / "model").iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    content = RunFolder(unbroken).read()
    assert (content["status"], content["step"], content["seed"]) == ("finished", 12, 0)
    assert content["best_bpb"] == min(line["val_bpb"] for line in lines if "val_bpb" in line)
    assert content["versions"]["torch"] == torch.__version__
    model, tokenizer = load(unbroken)
    assert model.config.vocab_size == tokenizer.vocab_size
    assert not model.training


@pytest.mark.parametrize("preset", temper.PRESETS)
def test_the_loss_falls_for_every_preset(preset, tiny, tmp_path):
    assert main(command(tiny, tmp_path / "run", "--model.preset", preset, "--train.save-every", "0")) == 0
    found = losses(tmp_path / "run")
    assert found[-1] < found[0] - 0.5
    validated = [line for line in run_dir.read_log(tmp_path / "run" / "metrics.jsonl") if "val_bpb" in line]
    if preset == "residual":
        assert not any(name in line for line in validated for name in MIXING)
        return
    for line in validated:
        assert (line["res_off_diagonal"] == 0) == (preset == "mhc-identity")
        assert 0 <= line["res_off_diagonal"] < 1
        # HC alone may amplify.
        assert line["composite_gain"] == pytest.approx(1, abs=0.5 if preset == "hc" else 1e-5)
        assert line["composite_backward_gain"] == pytest.approx(1, abs=0.5 if preset == "hc" else 0.01)
        assert 0 < line["stream_similarity"] <= 1


def test_mixing_is_what_observe_says_and_changes_no_other_number(tiny, tmp_path, unbroken, monkeypatch):
    from temper_lab.data import open_corpus, validation_batches
    from temper_lab.train.trainer import Trainer

    model, tokenizer = load(unbroken)
    recipe = Recipe.from_dict(RunFolder(unbroken).read()["recipe"])
    corpus = open_corpus(recipe.data.corpus, val_fraction=recipe.data.val_fraction)
    batch, _ = validation_batches(corpus, tokenizer, recipe.train.device_batch_size, recipe.model.context, 1)[0]
    with torch.no_grad(), temper.observe(model) as observation:
        model(batch)
    sites = observation.reports()
    lines = run_dir.read_log(unbroken / "metrics.jsonl")
    expected = [
        sum(site.off_diagonal for site in sites) / len(sites),
        sites[-1].composite_forward_gain,
        sites[-1].composite_backward_gain,
        sum(site.stream_similarity for site in sites) / len(sites),
    ]
    assert [lines[-1][name] for name in MIXING] == pytest.approx(expected, rel=1e-6)
    monkeypatch.setattr(Trainer, "_mixing", lambda self: {})
    assert main(command(tiny, tmp_path / "run")) == 0
    plain = [{key: value for key, value in line.items() if key not in MIXING} for line in lines]
    assert run_dir.read_log(tmp_path / "run" / "metrics.jsonl") == plain


def test_killed_at_a_random_step_and_resumed_it_is_the_unbroken_run(tiny, tmp_path, unbroken, capsys):
    out = tmp_path / "run"
    step = random.randint(1, 11)
    process = start("-m", "temper_lab", *command(tiny, out))
    wait_for_step(out, step, process)
    process.kill()
    process.communicate()
    assert run_dir.summary(out)["status"] == "killed"
    assert main(["train", "--out", str(out), "--resume"]) == 0, f"killed at step {step}"
    assert_same_run(out, unbroken)
    assert RunFolder(out).read()["status"] == "finished"


def test_killed_again_and_again_it_is_still_the_unbroken_run(tiny, tmp_path, unbroken, monkeypatch):
    """The same in one process and for many steps: what follows a checkpoint is thrown away by an error."""
    from temper_lab.train.trainer import Trainer

    class KilledError(BaseException):
        pass

    out, update, reached = tmp_path / "run", Trainer._update, 0

    def fragile(self):
        nonlocal reached
        line = update(self)
        if self.step == reached + 4:
            reached = self.step - self.step % 3
            raise KilledError
        return line

    monkeypatch.setattr(Trainer, "_update", fragile)
    with pytest.raises(KilledError):
        main(command(tiny, out))
    for _ in range(2):
        with pytest.raises(KilledError):
            main(command(tiny, out, "--resume"))
    monkeypatch.undo()
    assert main(command(tiny, out, "--resume")) == 0
    assert_same_run(out, unbroken)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_and_says_how_to_resume(number, tiny, tmp_path):
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("started with this signal ignored, as by nohup; so are runs")
    out = tmp_path / "run"
    options = ["--train.steps", "4000", "--train.save-every", "0", "--train.val-every", "0"]
    process = start("-m", "temper_lab", *command(tiny, out, *options))
    wait_for_step(out, 2, process)
    process.send_signal(number)
    error = error_of(process)
    assert process.returncode == 128 + number
    step = len(losses(out))
    assert f"temper train --out {out} --resume" in error
    assert f"step-{step:06d}" in error
    assert (RunFolder(out).read()["status"], RunFolder(out).read()["step"]) == ("interrupted", step)
    assert checkpoint.latest(out / "checkpoints")[0].step == step


def test_a_damaged_checkpoint_is_skipped_with_a_message(tiny, tmp_path, unbroken, capsys):
    out = tmp_path / "run"
    assert main(command(tiny, out)) == 0
    damaged = out / "checkpoints" / "step-000012" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    capsys.readouterr()
    assert main(command(tiny, out, "--resume")) == 0
    said = capsys.readouterr().err
    assert "step-000012: model.safetensors is truncated" in said
    assert "resumed from" in said
    assert "step-000009" in said
    assert_same_run(out, unbroken)


def test_a_foreign_checkpoint_is_refused(tiny, tmp_path, unbroken, capsys):
    out = tmp_path / "run"
    assert main(command(tiny, out, "--model.preset", "residual")) == 0
    found, _ = checkpoint.latest(unbroken / "checkpoints")
    tensors = {"model": found.model(), "optimizer": found.optimizer(), "state": found.state}
    checkpoint.save(out / "checkpoints", 12, **tensors)
    assert main(command(tiny, out, "--model.preset", "residual", "--resume")) == 1
    assert "these weights are of another model" in capsys.readouterr().err


def test_out_of_disk_keeps_the_previous_checkpoint(tiny, tmp_path, unbroken, monkeypatch, capsys):
    out, write, count = tmp_path / "run", files.write_tensors, 0

    def full(path, tensors):
        nonlocal count
        count += 1
        # Two files a checkpoint: the second one fails half way.
        if count == 4:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, tensors)

    monkeypatch.setattr("temper_lab.train.checkpoint.write_tensors", full)
    assert main(command(tiny, out)) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-000003"]
    assert RunFolder(out).read()["status"] == "failed"
    monkeypatch.undo()
    assert main(command(tiny, out, "--resume")) == 0
    assert_same_run(out, unbroken)


def test_a_loss_that_is_not_finite_stops_the_run(tiny, tmp_path, capsys, monkeypatch):
    from temper_lab.optim import Optimizers

    out, step = tmp_path / "run", Optimizers.step

    def spoil(self, index, total):
        norm = step(self, index, total)
        if index == 4:
            with torch.no_grad():
                self.groups["head"]["head.weight"].fill_(float("nan"))
        return norm

    monkeypatch.setattr(Optimizers, "step", spoil)
    assert main(command(tiny, out, "--train.val-every", "0")) == 1
    error = capsys.readouterr().err
    assert "step 6: the loss is nan" in error
    assert str(out / "checkpoints") in error
    assert checkpoint.latest(out / "checkpoints")[0].step == 3
    content = RunFolder(out).read()
    assert content["status"] == "failed"
    assert "nan" in content["error"]


def test_accumulation_is_one_large_batch(tiny, tmp_path):
    for rows in ("8", "2"):
        options = ["--train.device-batch-size", rows, "--train.precision", "float64", "--train.val-every", "0"]
        assert main(command(tiny, tmp_path / rows, *options)) == 0
    assert losses(tmp_path / "8") == pytest.approx(losses(tmp_path / "2"), rel=1e-9)


def torchrun(count: int, *words: str) -> str:
    """What so many processes of the lab write to stderr; they end well, or the test fails."""
    process = start(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count), "-m", "temper_lab", *words
    )
    error = error_of(process)
    assert process.returncode == 0, error
    return error


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_are_one_process(parallel, tiny, tmp_path):
    options = ["--data.num-shards", "2", "--train.precision", "float64", "--train.steps", "6"]
    one, two = tmp_path / "one", tmp_path / "two"
    assert main(command(tiny, one, *options)) == 0
    error = torchrun(2, *command(tiny, two, *options, "--train.parallel", parallel))
    assert error.count("finished 6 steps") == 1
    for mine, theirs in zip(*(run_dir.read_log(out / "metrics.jsonl") for out in (one, two)), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9)
    mine, theirs = (load_file(out / "model" / "model.safetensors") for out in (one, two))
    for name, tensor in mine.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=0, atol=1e-6)
    # Interrupted in two processes and resumed in two.
    (two / "checkpoints" / "step-000006" / "manifest.json").unlink()
    before = (two / "metrics.jsonl").read_bytes()
    assert "step-000003" in torchrun(2, "train", "--out", str(two), "--resume")
    assert (two / "metrics.jsonl").read_bytes() == before
    names = {path.name for path in (two / "checkpoints" / "step-000003").iterdir()}
    parts = {"shards.json", "shard-00000.safetensors", "shard-00001.safetensors"}
    assert names - {"manifest.json", "state.json"} == (parts if parallel == "fsdp" else set(checkpoint.FILES[:2]))
    # The shares do not depend on the number of processes, so one can go on where two were.
    (two / "checkpoints" / "step-000006" / "manifest.json").unlink()
    assert main(["train", "--out", str(two), "--resume"]) == 0
    assert losses(two) == pytest.approx(losses(one), rel=1e-9)


def test_two_copies_go_on_where_one_process_was(tiny, tmp_path):
    """HSDP with two copies in one shard each, from the whole checkpoint of one process."""
    one, two = tmp_path / "one", tmp_path / "two"
    assert main(command(tiny, one, "--data.num-shards", "2", "--train.precision", "float64", "--train.steps", "6")) == 0
    shutil.copytree(one, two)
    (two / "checkpoints" / "step-000006" / "manifest.json").unlink()
    error = torchrun(2, "train", "--out", str(two), "--resume", "--train.parallel", "fsdp", "--train.replicas", "2")
    assert "step-000003" in error
    assert losses(two) == pytest.approx(losses(one), rel=1e-9)
    saved = [checkpoint.latest(out / "checkpoints")[0] for out in (one, two)]
    for mine, theirs in zip(*((found.model(), found.optimizer()) for found in saved), strict=True):
        torch.testing.assert_close(theirs, mine, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_four_processes_share_two_copies(tiny, tmp_path):
    options = ["--data.num-shards", "4", "--train.precision", "float64", "--train.steps", "6"]
    one, four = tmp_path / "one", tmp_path / "four"
    assert main(command(tiny, one, *options)) == 0
    torchrun(4, *command(tiny, four, *options, "--train.parallel", "fsdp", "--train.replicas", "2"))
    assert losses(four) == pytest.approx(losses(one), rel=1e-9)
    # With other shards, and with none.
    for count, parallel in ((4, "fsdp"), (2, "fsdp"), (2, "ddp")):
        (four / "checkpoints" / "step-000006" / "manifest.json").unlink()
        words = ["--resume", "--train.replicas", "1", "--train.parallel", parallel]
        assert "step-000003" in torchrun(count, "train", "--out", str(four), *words)
        assert losses(four) == pytest.approx(losses(one), rel=1e-9)


def test_a_folder_that_is_taken(tiny, tmp_path, unbroken, capsys):
    assert main(command(tiny, unbroken)) == 1
    assert "holds a run already; --resume continues it" in capsys.readouterr().err
    (tmp_path / "notes.txt").write_text("mine")
    assert main(command(tiny, tmp_path)) == 1
    assert "is not empty" in capsys.readouterr().err
    assert main(command(tiny, tmp_path, "--resume")) == 1
    assert "holds no run to resume" in capsys.readouterr().err
    assert main(command(tiny, tmp_path / "notes.txt")) == 1
    assert "is a file" in capsys.readouterr().err
    with RunFolder(unbroken).claimed():
        assert run_dir.summary(unbroken)["status"] == "finished"
        assert main(command(tiny, unbroken, "--resume")) == 1
    assert "another process is training" in capsys.readouterr().err


def test_a_changed_recipe_is_not_resumed(tiny, unbroken, capsys):
    assert main(command(tiny, unbroken, "--resume", "--train.steps", "13", "--optim.clip", "2")) == 1
    error = capsys.readouterr().err
    assert "optim.clip was 1.0, is 2.0" in error
    assert "train.steps was 12, is 13" in error
    assert RunFolder(unbroken).read()["status"] == "finished"


def test_a_finished_run_has_nothing_to_resume(tiny, unbroken, capsys):
    before = (unbroken / "metrics.jsonl").read_bytes()
    assert main(command(tiny, unbroken, "--resume")) == 0
    assert "finished 12 steps" in capsys.readouterr().err
    assert (unbroken / "metrics.jsonl").read_bytes() == before


def test_what_is_wrong_before_the_start_leaves_no_folder(tiny, tmp_path, capsys):
    for option, value, words in (
        ("--data.corpus", str(tmp_path / "none"), "no such file or folder"),
        ("--data.corpus", "data/climbmix", "temper data download"),
        ("--tokenizer.path", str(tmp_path / "none"), "no tokenizer there"),
        ("--train.device", "cuda:99", "no GPU"),
    ):
        if option == "--train.device" and torch.cuda.is_available():
            continue
        out = tmp_path / "run"
        assert main(command(tiny, out, option, value)) == 1
        assert words in capsys.readouterr().err
        assert not out.exists()


def test_a_model_that_is_not_built_leaves_no_folder(tiny, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(command(tiny, out, "--model.preset", "mhc-lite", "--model.num-streams", "8")) == 1
    assert "40,320 at N=8" in capsys.readouterr().err
    assert not out.exists()


def test_a_line_above_the_live_bar_leaves_the_bar_as_it_is(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with Bar("training", 10) as bar:
        bar.update(5, "half")
        bar.say("a sample [bold] with brackets")
    shown = screen.getvalue()
    assert "a sample [bold] with brackets" in shown
    assert "[bold]training" not in shown


def test_a_tokenizer_of_ones_own_the_best_model_and_tensorboard(tiny, tmp_path, unbroken, capsys):
    pytest.importorskip("tensorboard")
    out = tmp_path / "run"
    options = [
        "--tokenizer.path",
        str(unbroken),
        "--model.vocab-size",
        "300",
        "--train.keep-best",
        "--train.tensorboard",
    ]
    assert main(command(tiny, out, *options)) == 0
    assert "the tokenizer has 320 tokens, not 300" in capsys.readouterr().err
    assert (out / "tokenizer.json").read_bytes() == (unbroken / "tokenizer.json").read_bytes()
    assert losses(out) == losses(unbroken)
    assert load(out / "best")[0].config == load(out)[0].config
    assert list((out / "tensorboard").iterdir())


def test_a_damaged_tokenizer_or_run_file_says_so(tiny, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(command(tiny, out, "--train.steps", "2", "--train.val-every", "0")) == 0
    whole = (out / "tokenizer.json").read_text()
    (out / "tokenizer.json").write_text(whole[:100])
    assert main(["train", "--out", str(out), "--resume"]) == 1
    assert "tokenizer.json is not JSON" in capsys.readouterr().err
    (out / "run.json").write_text(json.dumps({"format": "other"}))
    assert main(["train", "--out", str(out), "--resume"]) == 1
    assert "has format 'other'" in capsys.readouterr().err
