"""Files and options that are wrong in every way: one line says so, and nothing hangs or is taken for granted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from io import BufferedReader, FileIO
from pathlib import Path

import pytest
import torch
from core_bundles import write_bundle
from safetensors.torch import load_file, save_file
from studies import results, run_entry

from temper_lab import io, recipe
from temper_lab.cli import main
from temper_lab.console import Bar
from temper_lab.data import corpus as corpus_module
from temper_lab.model import ModelConfig
from temper_lab.study.grid import read_grid
from temper_lab.study.spec import Study

DEEP = "[" * 100_000


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    options = ["--train.steps", "2", "--train.val-every", "1", "--train.sample-tokens", "0"]
    assert main(["train", "--recipe", str(tiny), "--out", str(out), *options]) == 0
    return out


@pytest.fixture
def model(finished, tmp_path) -> Path:
    return shutil.copytree(finished / "model", tmp_path / "model")


@pytest.fixture
def refused(capsys):
    """Runs a command that has to fail with one line of a readable length, which it gives back."""

    def run(*words: object, code: int = 1) -> str:
        capsys.readouterr()
        assert main([str(word) for word in words]) == code
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
        assert len(lines) == 1
        assert len(lines[0]) < 2_100
        assert "unexpected" not in lines[0]
        return lines[0]

    return run


CONFIGS = {
    "deep": DEEP,
    "a long number": '{"format": "temper-lab-1", "depth": 1%s}' % ("0" * 400),
    "a longer number": '{"format": "temper-lab-1", "depth": 1%s}' % ("0" * 5000),
    "infinity": '{"format": "temper-lab-1", "depth": Infinity}',
    "a list": '[{"format": "temper-lab-1"}]',
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_that_is_not_one(name, model, refused):
    (model / "config.json").write_text(CONFIGS[name])
    assert "config.json" in refused("sample", "--model", model, "--max-tokens", 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"depth": 10**9}, "depth is 1000000000"),
        ({"depth": 1000}, "its depth is 1000"),
        ({"head_dim": 2**31}, "head_dim is"),
        ({"num_streams": 2**31}, "num_streams is"),
        ({"rope_base": 2**64}, "64"),
        ({"rope_base": 1e31}, "rope_base is"),
        ({"preset": ["mhc"]}, "preset is"),
        ({"router": {"norm_clamp": [1]}}, "norm_clamp"),
        ({"routers": {"\u0663": {}}}, "routers has a site"),
        ({"router": "x" * 10**6}, "router is"),
    ],
)
def test_a_model_that_cannot_be(changes, words, model, refused):
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    assert words in refused("sample", "--model", model, "--max-tokens", 1)


def test_numbers_that_only_python_knows():
    for base in (float("nan"), float("inf"), True, "1e4"):
        with pytest.raises(ValueError, match="rope_base is"):
            ModelConfig(depth=1, vocab_size=300, context=8, rope_base=base)


def test_weights_that_are_whole_numbers(model, refused):
    tensors = load_file(model / "model.safetensors")
    name = next(iter(tensors))
    tensors[name] = torch.ones_like(tensors[name], dtype=torch.int32)
    save_file(tensors, model / "model.safetensors")
    assert f"{name} holds torch.int32" in refused("sample", "--model", model)


@pytest.mark.parametrize("device", ["x", "cuda:99", "meta", "mps", ""])
def test_a_device_that_is_not_here(device, finished, refused):
    assert "the device is" in refused("sample", "--model", finished, "--device", device, "--max-tokens", 1)


def test_more_tokens_than_there_are_numbers(finished, refused):
    refused("sample", "--model", finished, "--max-tokens", 2**62)
    refused("upcycle", "--model", finished, "--streams", 2**62, "--out", finished / "out")


@pytest.mark.parametrize(
    "text",
    [
        DEEP,
        '{"model": 1}',
        '{"model": {"type": "BPE"}, "pre_tokenizer": "x"}',
        '{"model": {"type": "BPE"}, "pre_tokenizer": {"pretokenizers": [1]}}',
        '{"model": {"type": "BPE"}, "pre_tokenizer": {"type": "ByteLevel"}, "added_tokens": ["x"]}',
        '{"model": {"type": "BPE"}, "pre_tokenizer": {"type": "ByteLevel"}, "added_tokens": 3}',
    ],
)
def test_a_tokenizer_that_is_none(text, tmp_path, refused):
    (tmp_path / "tokenizer.json").write_text(text)
    assert "tokenizer.json" in refused("tokenizer", "info", "--path", tmp_path)


def test_one_bad_run_hides_no_other(finished, tmp_path, capsys):
    root, bad = tmp_path / "runs", {}
    shutil.copytree(finished, root / "good")
    run = json.loads((finished / "run.json").read_text())
    for name, text in (
        ("deep", DEEP),
        ("status", json.dumps(run | {"status": {}})),
        ("recipe", json.dumps(run | {"recipe": []})),
        ("steps", json.dumps(run | {"recipe": run["recipe"] | {"train": {"steps": "x"}}})),
    ):
        bad[name] = shutil.copytree(finished, root / name)
        (root / name / "run.json").write_text(text)
    for name, text in (
        ("infinite", '{"step": Infinity}\n'),
        ("words", '{"step": 1, "val_bpb": "x"}\n'),
        ("nested", DEEP + "\n"),
        ("number", '{"step": 1e999}\n'),
    ):
        bad[name] = shutil.copytree(finished, root / name)
        (root / name / "metrics.jsonl").write_text(text)
    # Read as markup, one would be an error and the other would lose a part of its name.
    marked = [shutil.copytree(finished, root / name) for name in ("x[/]", "y[bold]")]
    (marked[0] / "run.json").write_text(json.dumps(run | {"status": "[/]"}))
    assert main(["runs", str(root)]) == 0
    shown = capsys.readouterr().out
    for name in ("good", *bad, "x[/", "y[bold]"):
        assert str(root / name) in shown
    assert shown.count("unreadable") == len(bad)
    assert main(["runs", str(root), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == len(bad) + 3


@pytest.mark.parametrize(
    "text",
    [
        f"a = {DEEP}",
        "[train]\nsteps = 1" + "0" * 400,
        "[train]\nsteps = 1" + "0" * 5000,
        "train = 1",
        "[model.router]\nrank = 1979-05-27",
        "base = ['x']",
        "x" * (2 << 20),
    ],
)
def test_a_recipe_that_is_none(text, tmp_path, refused):
    (tmp_path / "x.toml").write_text(text)
    assert "x.toml" in refused("train", "--recipe", tmp_path / "x.toml", "--dry-run")


@pytest.mark.parametrize(
    "changes", [{"recipe": 0}, {"grid": 3}, {"name": 1}, {"commands": "x"}, {"grid": [{"seeds": [[]]}]}]
)
def test_a_study_that_is_none(changes, tiny, tmp_path, refused):
    settings = recipe.load(tiny)
    study = Study("x", settings, read_grid({}, settings, "x"), ("temper",))
    (tmp_path / "study.json").write_text(json.dumps(study.to_dict() | changes))
    refused("compare", "--out", tmp_path, "--dry-run")


@pytest.mark.parametrize(
    "changes",
    [
        {"versions": 1},
        {"machine": []},
        {"cost": {"rows": [1]}},
        {"cost": {"setting": "x"}},
        {"methods": "x"},
        {"streams": {}},
        {"recipe": [1]},
        {"runs": [{"key": "x"}]},
    ],
)
def test_results_that_are_none(changes, tmp_path, refused):
    whole = results([run_entry("residual"), run_entry("mhc")])
    (tmp_path / "results.json").write_text(json.dumps(whole | changes))
    assert "results" in refused("report", tmp_path)


def test_results_with_numbers_of_any_size(tmp_path):
    whole = results([run_entry("residual"), run_entry("mhc"), run_entry("mhc", seed=1)])
    for run in whole["runs"]:
        run["final"] = {"train_loss": 1e308, "val_loss": -1e308, "bpb": 1e308}
        run.pop("parameters")
        run.pop("method")
    whole.pop("methods")
    (tmp_path / "results.json").write_text(json.dumps(whole))
    assert main(["report", str(tmp_path)]) == 0


def bomb(levels: int = 10) -> str:
    lines = ["a: &a [x, x, x, x, x, x, x, x, x, x]"]
    for index in range(1, levels):
        before, name = (chr(ord("a") + place) for place in (index - 1, index))
        lines.append(f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]")
    return "\n".join([*lines, f"icl_tasks: *{chr(ord('a') + levels - 1)}"])


def test_bundles_that_would_fill_the_memory(finished, tmp_path, refused):
    bundle = write_bundle(tmp_path / "bundle")
    words = ("eval", "core", "--model", finished, "--bundle", bundle)
    before = (bundle / "core.yaml").read_text()
    for text in (bomb(), DEEP, "x: " + "[" * 5000 + "]" * 5000, "icl_tasks: 1", "icl_tasks: [3]", "x" * (2 << 20)):
        (bundle / "core.yaml").write_text(text)
        assert "core.yaml" in refused(*words)
    (bundle / "core.yaml").write_text(before)
    table = bundle / "eval_meta_data.csv"
    lines = table.read_text().splitlines()
    table.write_text("\n".join([*lines, lines[1]]))
    assert "comes twice" in refused(*words)
    table.write_text("\n".join(lines))
    items = next((bundle / "eval_data").rglob("*.jsonl"))
    items.write_text(DEEP + "\n" + items.read_text())
    assert "nested too deeply" in refused(*words)


def test_a_zip_whose_streams_are_damaged(finished, tmp_path, refused):
    path = tmp_path / "bundle.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("core.yaml", "icl_tasks: " + "abc" * 5000)
    data = bytearray(path.read_bytes())
    data[45:60] = b"\xff" * 15
    path.write_bytes(data)
    assert "not a zip that can be unpacked" in refused("eval", "core", "--model", finished, "--bundle", path)


def test_a_dry_run_finds_what_the_run_would_refuse(tiny, tmp_path, refused, capsys):
    words = ("train", "--recipe", tiny, "--dry-run")
    assert "nowhere" in refused(*words, "--data.corpus", tmp_path / "nowhere")
    # A corpus that can be downloaded need not be there; the plan says how it gets there.
    for name, what in (("books", "books"), ("climbmix", "--shards K")):
        assert main([*map(str, words), "--data.corpus", str(tmp_path / name)]) == 0
        assert f"temper data download {what} --folder {tmp_path / name}" in capsys.readouterr().out
    # A dry run cuts and splits the corpus as the run will.
    folder = tmp_path / "books"
    folder.mkdir()
    (folder / "a.txt").write_text("one text")
    assert "one document" in refused(*words, "--data.corpus", folder, "--data.max-chars", 0)
    assert "the device is 'x'" in refused(*words, "--train.device", "x")
    assert "no tokenizer there" in refused(*words, "--tokenizer.path", tmp_path / "none")
    for option, value in (("depth", 10**9), ("num-streams", 2**31)):
        with pytest.raises(SystemExit) as stopped:
            main([*map(str, words), f"--model.{option}", str(value)])
        assert stopped.value.code == 2


def test_options_that_are_not_for_this(finished, tmp_path, refused):
    bundle = write_bundle(tmp_path / "bundle")
    words = ("eval", "core", "--model", finished, "--bundle", bundle)
    assert "expected http" in refused(*words, "--download", "nonsense")
    words = ("upcycle", "--model", finished, "--streams", 4, "--preset", "temper-cp", "--out", tmp_path / "out")
    assert "--blocks" in refused(*words, "--blocks", "nonsense")
    assert "--sites" in refused(*words, "--sites", 2)


def test_numbers_that_are_too_large_for_any_use(finished, tiny, tmp_path, refused):
    for words in (["sample", "--model", str(finished), "--num"], ["data", "info", "--shuffle-mb"], ["params", "--dim"]):
        for number in ("9" * 400, "9" * 5000, str(1 << 63)):
            with pytest.raises(SystemExit) as stopped:
                main([*words, number])
            assert stopped.value.code == 2
    corpus = recipe.load(str(tiny)).data.corpus
    # A split that is too small for a batch repeats itself, which would take for ever.
    for words in (["eval", "bpb", "--model", finished], ["data", "info"]):
        assert "expected 1 to 65,536" in refused(*words, "--corpus", corpus, "--rows", 1 << 62)


def test_a_grid_that_nobody_could_train(tiny, refused):
    values = ",".join(f"0.{number:03d}" for number in range(1, 200))
    axes = [word for name in ("matrix_lr", "head_lr", "embedding_lr") for word in ("--vary", f"optim.{name}={values}")]
    words = refused("compare", "--recipe", tiny, "--dry-run", *axes)
    assert "the grid has" in words
    assert "runs; expected at most 10,000" in words


def test_files_that_would_keep_their_reader_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for read in (io.read_json, io.read_text, io.read_tensors, io.read_yaml):
        with pytest.raises(io.FileError, match="is not a file"):
            read(tmp_path / "pipe")
    assert main(["train", "--recipe", str(tmp_path / "pipe"), "--help"]) == 0
    (tmp_path / "long").write_text('"' + "x" * 100 + '"')
    with pytest.raises(io.FileError, match="more than 50 bytes"):
        io.read_text(tmp_path / "long", 50)


def test_no_name_commands_a_terminal(finished, tmp_path, capsys):
    name = "x\x1b]0;title\x07\x1b[2J\x9b31m\u202e[/]"
    run = shutil.copytree(finished, tmp_path / name)
    about = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(about | {"status": name, "recipe_name": name}))
    assert main(["runs", str(tmp_path)]) == 0
    assert main(["sample", "--model", str(tmp_path / name / "missing")]) == 1
    said = capsys.readouterr()
    for text in (said.out, said.err):
        assert "\\x1b]0;title" in text
        assert not set("\x1b\x07\x9b\u202e") & set(text)


def test_a_run_needs_no_streams(tiny, tmp_path, monkeypatch):
    words = f"{sys.executable} -m temper_lab train --recipe {tiny} --out {tmp_path}/run --train.steps 1 <&- >&- 2>&-"
    assert subprocess.run(["bash", "-c", words], check=False).returncode == 0
    assert (tmp_path / "run" / "model").is_dir()
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 1
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        with Bar("training", 1) as bar:
            bar.update(1, "a log on a full disk", is_notable=True)
            bar.say("a sample")
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())


def test_output_that_cannot_be_written_is_an_error(tmp_path):
    for words in ("--help", "params --help"):
        command = f"{sys.executable} -m temper_lab {words}"
        done = subprocess.run(["bash", "-c", f"{command} >/dev/full"], capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1
        command = f"set -o pipefail; {command} | true"
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def test_an_error_is_a_line_and_with_debug_a_traceback(capsys, monkeypatch, finished):
    words = ["sample", "--model", str(finished), "--max-tokens", "1"]

    def broken(*args: object, **options: object) -> None:
        raise LookupError("line one\nline two\n" + "x" * 10_000)

    monkeypatch.setattr("temper_lab.train.model_dir.load", broken)
    assert main(words) == 1
    text = capsys.readouterr().err
    assert text.startswith("error: LookupError: line one line two xxx")
    assert text.count("\n") == 1
    assert len(text) < 2_200
    assert "--debug shows where" in text
    assert main([*words, "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_the_lab_is_imported_where_there_is_no_fcntl():
    """Windows has neither of the two modules."""
    code = """
        import importlib, pkgutil, sys
        sys.modules["fcntl"] = sys.modules["resource"] = None
        import temper_lab
        for module in pkgutil.iter_modules(temper_lab.__path__):
            if module.name not in ("__main__", "hf", "nanochat"):
                importlib.import_module(f"temper_lab.{module.name}")
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_one_long_line_is_read_once(tmp_path, monkeypatch):
    """A line of 64 groups, which every group that begins inside it would read to its end."""
    long = json.dumps({"text": "x" * (16 << 20)})
    path = tmp_path / "long.jsonl"
    path.write_text(f'{{"text": "first"}}\n{long}\n{{"text": "last"}}\n')
    parts = corpus_module.parts_of(path, "long.jsonl")
    assert len(parts) > 60
    read = 0

    class Counted(BufferedReader):
        def readline(self, *args: int) -> bytes:
            nonlocal read
            line = super().readline(*args)
            read += len(line)
            return line

    monkeypatch.setattr(corpus_module, "open", lambda *args: Counted(FileIO(args[0])), raising=False)
    lengths = [len(text) for part in parts for _, text in corpus_module.read_part(part)]
    assert lengths == [5, 16 << 20, 4]
    assert read < 3 * len(long)
    monkeypatch.setattr(corpus_module, "MAX_LINE_BYTES", 1 << 20)
    with pytest.raises(ValueError, match="the line at byte 18 has more than"):
        list(corpus_module.read_part(parts[0]))
