"""The commands of the lab as a user types them."""

import json
import shutil
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from temper_lab.cli import COMMANDS, main
from temper_lab.run import RunFolder


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "first"
    options = ["--train.steps", "3", "--train.val-every", "1", "--train.sample-tokens", "0"]
    assert main(["train", "--recipe", str(tiny), "--out", str(out), *options]) == 0
    return out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_teaches_with_examples(name, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([*name.split(), "--help"])
    assert stopped.value.code == 0
    assert f"temper {name}" in capsys.readouterr().out.split("options")[0].split("\n", 2)[2]


def test_the_list_of_commands(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)
    assert main(["data", "--help"]) == 0
    out = capsys.readouterr().out
    assert "data download" in out
    for words, said in (
        ([], "usage"),
        (["trian"], "Did you mean `train`"),
        (["eval", "bbp"], "Did you mean `eval bpb`"),
    ):
        assert main(words) == 2
        assert said in capsys.readouterr().err


def test_help_does_not_wait_for_torch():
    code = "import sys; from temper_lab.cli import main; main(['--help']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_train_without_a_recipe_or_a_folder(capsys, tmp_path):
    assert main(["train", "--out", str(tmp_path)]) == 1
    assert "--recipe is missing; expected a TOML file or one of ablations-cpu" in capsys.readouterr().err
    assert main(["train", "--recipe", "cpu-smoke"]) == 1
    assert "--out is missing" in capsys.readouterr().err
    assert main(["train", "--resume"]) == 1
    assert "holds no run to resume" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--recipe", "cpu-smoke", "--model.preset", "temper-pc"])
    assert stopped.value.code == 2
    assert "temper-cp" in capsys.readouterr().err


def test_sample(finished, capsys):
    words = ["sample", "--model", str(finished), "--prompt", "the people", "--num", "2", "--max-tokens", "8"]
    outputs = []
    for extra in (["--top-k", "20"], ["--top-k", "20"], ["--top-p", "0.9", "--seed", "1"], ["--temperature", "0"]):
        assert main([*words, *extra]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != outputs[2]
    assert all(output.count("the people") >= 2 for output in outputs)
    assert main([*words, "--top-p", "7"]) == 1
    assert "top_p is 7.0" in capsys.readouterr().err
    assert main(["sample", "--model", str(finished / "model"), "--num", "0"]) == 1
    assert "--num is 0" in capsys.readouterr().err


def test_foreign_and_damaged_models(finished, tmp_path, capsys):
    def fails(words):
        assert main(["sample", "--model", str(tmp_path / "model")]) == 1
        assert words in capsys.readouterr().err

    fails("there is no model folder")
    shutil.copytree(finished / "model", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    for changes, words in (
        ({"format": "other"}, "not a model folder of this lab"),
        ({"colour": "red"}, "unknown model option 'colour'"),
        ({"preset": "mhc"}, "these weights are of another model"),
        ({"depth": 2}, "these weights are of another model"),
    ):
        (tmp_path / "model" / "config.json").write_text(json.dumps(config | changes))
        fails(words)
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    fails("not a complete safetensors file")
    shutil.copy(finished / "model" / "model.safetensors", weights)
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    fails("not a tokenizer of this lab")


def test_runs_lists_status_step_and_best_bpb(finished, tmp_path, capsys):
    root = tmp_path / "runs"
    for name, status in (("a", "finished"), ("b", "running"), ("c", "interrupted"), ("d", "running")):
        shutil.copytree(finished, root / name)
        RunFolder(root / name).write(status=status)
    (root / "e").mkdir()
    (root / "e" / "run.json").write_text("{}")
    shutil.copytree(finished, root / "f")
    (root / "f" / "run.json").write_text("{")
    with RunFolder(root / "d").claimed():
        assert main(["runs", str(root), "--json"]) == 0
        lines = {line["run"].split("/")[-1]: line for line in json.loads(capsys.readouterr().out)}
        assert main(["runs", str(root)]) == 0
        table = capsys.readouterr().out
    statuses = {name: line["status"] for name, line in lines.items()}
    assert statuses == {"a": "finished", "b": "killed", "c": "interrupted", "d": "running", "f": "unreadable"}
    bpbs = [json.loads(line)["val_bpb"] for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert (lines["a"]["step"], lines["a"]["steps"], lines["a"]["best_bpb"]) == (3, 3, min(bpbs))
    for text in ("killed", "3/3", f"{min(bpbs):.4f}", "is not JSON"):
        assert text in table
    (tmp_path / "empty").mkdir()
    assert main(["runs", str(tmp_path / "empty")]) == 0
    assert "no runs in" in capsys.readouterr().out
    assert main(["runs", str(tmp_path / "none")]) == 1
    assert "is not a folder" in capsys.readouterr().err


def test_data(corpus_folder, tmp_path, capsys):
    assert main(["data", "info", "--corpus", str(corpus_folder)]) == 0
    out = capsys.readouterr().out
    assert "train 38 documents" in out
    assert "val   2 documents" in out
    assert "documents each" in out
    assert main(["data", "info", "--corpus", str(corpus_folder), "--batches", "0"]) == 0
    assert "documents each" not in capsys.readouterr().out
    assert main(["data", "info", "--corpus", str(corpus_folder), "--rows", "0"]) == 1
    assert "--rows is 0; expected at least 1" in capsys.readouterr().err
    hub = tmp_path / "hub"
    hub.mkdir()
    for name in ("shard_00000.parquet", "shard_06542.parquet"):
        pq.write_table(pa.table({"text": [f"{name} {index}" for index in range(8)]}), hub / name)
    words = ["data", "download", "--shards", "1", "--folder", str(tmp_path / "climbmix"), "--source", str(hub)]
    for _ in range(2):
        assert main(words) == 0
        assert "2 shards in" in capsys.readouterr().out
    (hub / "shard_00000.parquet").unlink()
    (tmp_path / "climbmix" / "shard_00000.parquet").unlink()
    assert main(words) == 1
    assert "has no shard_00000.parquet" in capsys.readouterr().err
    for words, message in (
        (["download"], "data download climbmix: expected --shards K"),
        (["download", "books", "--shards", "3"], "--shards is for climbmix"),
        (["download", "books", "--source", str(hub)], "does not have the books of the manifest: 52 differ"),
        (["check", "--folder", str(hub)], "52 of 52 books"),
        (["check", "--folder", str(tmp_path / "none")], "no such folder; temper data download books"),
    ):
        assert main(["data", *words]) == 1
        assert message in capsys.readouterr().err


def test_tokenizer(corpus_folder, tmp_path, capsys):
    words = ["tokenizer", "train", "--out", str(tmp_path), "--corpus", str(corpus_folder), "--vocab-size", "290"]
    assert main(words) == 0
    assert "290 tokens" in capsys.readouterr().out
    assert (
        main(["tokenizer", "info", "--path", str(tmp_path), "--corpus", str(corpus_folder), "--text", "the law"]) == 0
    )
    out = capsys.readouterr().out
    assert "bytes per token" in out
    assert "290 tokens of up to" in out
    assert main(["tokenizer", "info", "--path", str(tmp_path / "none")]) == 1
    assert "no tokenizer there" in capsys.readouterr().err
