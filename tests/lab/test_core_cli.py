"""`temper eval core` as a user types it."""

import csv
import json
import os
import subprocess
import sys

import pytest
from core_bundles import random_gpt, write_bundle

from temper_lab.cli import main
from temper_lab.data import open_corpus
from temper_lab.eval.core import scoring, summary
from temper_lab.tokenizer import Tokenizer
from temper_lab.train import model_dir


@pytest.fixture(scope="module")
def model(tmp_path_factory, corpus_folder):
    return save(tmp_path_factory.mktemp("models") / "first", corpus_folder, seed=0)


def save(folder, corpus_folder, *, seed):
    tokenizer = Tokenizer.train(open_corpus(corpus_folder).texts(), 300)
    network = random_gpt(tokenizer.vocab_size, 96, depth=1, seed=seed)
    file = tokenizer.save(folder.with_suffix(".tokenizer"))
    return model_dir.save_model(folder, network.config.to_dict(), network.state_dict(), {"tokenizer.json": file})


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return write_bundle(tmp_path_factory.mktemp("bundle") / "core")


@pytest.fixture
def words(model, bundle):
    return ["eval", "core", "--model", str(model), "--bundle", str(bundle)]


@pytest.fixture
def whole(words, tmp_path, capsys):
    """The results of an evaluation that nobody disturbed."""
    assert main([*words, "--out", str(tmp_path / "whole.json")]) == 0
    capsys.readouterr()
    return json.loads((tmp_path / "whole.json").read_text())


def test_table_json_and_csv(words, tmp_path, capsys, bundle):
    out = tmp_path / "results" / "core.json"
    assert main([*words, "--max-per-task", "8", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    found = json.loads(out.read_text())
    assert set(found) == {"tasks", "core", "missing"}
    assert list(found["tasks"]) == ["arc_easy", "winograd", "squad"]
    assert found["core"] is None
    assert len(found["missing"]) == 19
    assert "coqa" in found["missing"]
    for label, task in found["tasks"].items():
        assert set(task) == {"accuracy", "centered", "baseline", "items", "correct"}
        assert task["items"] == len(task["correct"]) == 8
        assert task["accuracy"] == sum(task["correct"]) / 8
        assert f"{task['accuracy']:.4f}" in next(line for line in said.splitlines() if label in line)
    assert not any(line.strip().startswith("CORE") for line in said.splitlines())
    assert "no CORE: 19 of 22 tasks are missing" in said
    assert f"baselines from {bundle}/eval_meta_data.csv" in said
    assert "language: mean accuracy" in said
    assert "at most 8 items" in said
    with open(out.with_suffix(".csv"), newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(line["task"], line["items"]) for line in lines] == [(label, "8") for label in found["tasks"]]
    assert all(float(line["seconds"]) >= 0 for line in lines)
    assert sorted(path.name for path in out.parent.iterdir()) == ["core.csv", "core.json"]

    assert main([*words, "--tasks", "squad, winograd", "--max-per-task", "8", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["tasks"] == {label: found["tasks"][label] for label in ("winograd", "squad")}
    # A name for the CSV works the other way round.
    assert main([*words, "--tasks", "squad", "--out", str(tmp_path / "other.csv")]) == 0
    assert (tmp_path / "other.csv").read_text().startswith("task,accuracy")
    assert list(json.loads((tmp_path / "other.json").read_text())["tasks"]) == ["squad"]


def interrupt_after(monkeypatch, chunks):
    """Ctrl-C after so many chunks; gives the list of what was asked."""
    asked = []
    original = scoring.answers_to

    def answers_to(model, task, indices, **options):
        if len(asked) == chunks:
            raise KeyboardInterrupt
        asked.append((task.label, tuple(indices)))
        return original(model, task, indices, **options)

    monkeypatch.setattr(scoring, "CHUNK_ITEMS", 5)
    monkeypatch.setattr(scoring, "answers_to", answers_to)
    return asked


def test_an_interrupted_evaluation_goes_on(words, whole, tmp_path, capsys, monkeypatch, corpus_folder):
    out = tmp_path / "again" / "core.json"
    with monkeypatch.context() as patch:
        # Twelve items are three chunks: this is in the middle of the second task.
        before = interrupt_after(patch, 4)
        assert main([*words, "--out", str(out)]) == 130
        assert "the same command continues from there" in capsys.readouterr().err
        assert [path.name for path in out.parent.iterdir()] == [".core.json.partial"]
    other = save(tmp_path / "other", corpus_folder, seed=1)
    with monkeypatch.context() as patch:
        # Another model has nothing of it.
        foreign = interrupt_after(patch, 0)
        changed = [str(other) if word == words[3] else word for word in words]
        assert main([*changed, "--out", str(out)]) == 130
        assert foreign == []
    with monkeypatch.context() as patch:
        after = interrupt_after(patch, None)
        assert main([*words, "--out", str(out)]) == 0
    asked = [(label, index) for label, indices in before + after for index in indices]
    assert len(asked) == len(set(asked)) == 36
    assert json.loads(out.read_text()) == whole
    assert sorted(path.name for path in out.parent.iterdir()) == ["core.csv", "core.json"]


def test_a_damaged_partial_file_is_started_anew(words, whole, tmp_path, capsys):
    for content in ("{", "[]", '{"format": "temper-core-1", "model": "another", "tasks": {}}'):
        (tmp_path / ".core.json.partial").write_text(content)
        assert main([*words, "--out", str(tmp_path / "core.json")]) == 0
        assert json.loads((tmp_path / "core.json").read_text()) == whole
        assert not (tmp_path / ".core.json.partial").exists()


def test_two_processes_find_the_same(words, whole, tmp_path):
    out = tmp_path / "two.json"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "temper_lab", *words, "--out", str(out)]
    settings = {"capture_output": True, "text": True, "timeout": 120, "env": {**os.environ, "OMP_NUM_THREADS": "1"}}
    done = subprocess.run(command, **settings)
    assert done.returncode == 0, done.stderr
    assert json.loads(out.read_text()) == whole
    assert done.stdout.count("no CORE") == 1
    # What the first process cannot read, it says once.
    done = subprocess.run([*command, "--tasks", "none"], **settings)
    assert done.returncode != 0
    assert done.stderr.count("unknown task 'none'") == 1


def test_a_whole_core_is_printed_as_core(words, bundle, tmp_path, capsys, monkeypatch):
    labels = ("arc_easy", "winograd", "squad")
    monkeypatch.setattr(summary, "CORE_TASKS", labels)
    assert main([*words, "--out", str(tmp_path / "core.json")]) == 0
    found = json.loads((tmp_path / "core.json").read_text())
    assert found["core"] == pytest.approx(sum(task["centered"] for task in found["tasks"].values()) / 3)
    assert f"CORE {found['core']:.4f}" in capsys.readouterr().out


def test_errors_are_one_line_and_leave_nothing(words, bundle, tmp_path, capsys):
    broken = write_bundle(tmp_path / "broken")
    with open(broken / "eval_data" / "reading" / "squad.jsonl", "a") as file:
        file.write("{\n")
    (tmp_path / "not.zip").write_text("not a zip")
    (tmp_path / "empty").mkdir()
    out = tmp_path / "out" / "core.json"
    for options, said in (
        (["--bundle", str(broken)], "squad.jsonl: line 13 is not JSON"),
        (["--bundle", str(tmp_path / "not.zip")], "is not a zip that can be unpacked"),
        (["--bundle", str(tmp_path / "empty")], "no core.yaml there"),
        (["--bundle", str(tmp_path / "none")], "there is no"),
        (["--bundle", str(tmp_path / "none"), "--download", "ftp://x"], "expected http:// or https://"),
        (["--model", str(tmp_path / "none")], "there is no model folder"),
        (["--max-per-task", "0"], "--max-per-task is 0; expected at least 1"),
        (["--max-per-task", "2"], "arc_easy: 2 items"),
        (["--tasks", "arc_esay"], "unknown task 'arc_esay'"),
        (["--tasks", ","], "--tasks names no task"),
        (["--tasks", "coqa"], "does not hold eval_data/reading/coqa.jsonl"),
        (["--sha256", "0"], "--sha256 needs --download"),
    ):
        assert main([*words, *options, "--out", str(out)]) == 1, options
        error = capsys.readouterr().err
        assert said in error
        assert error.startswith("error: ")
        assert error.count("\n") == 1
        assert not out.parent.exists()
    assert main([*words, "--out", str(tmp_path / "empty")]) == 1
    assert "a folder; expected the name of a file" in capsys.readouterr().err
    assert not list((tmp_path / "empty").iterdir())
