"""The commands of the lab as a user types them."""

import json
import re
import shlex
import shutil
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import temper
from temper_lab.cli import BUILDERS, COMMANDS, _call, completion, function_of, main
from temper_lab.cli.options import usage
from temper_lab.data import loader, open_corpus
from temper_lab.data.reader import Reader
from temper_lab.recipe import load
from temper_lab.train.run_dir import RunFolder


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "first"
    options = ["--train.steps", "3", "--train.val-every", "1", "--train.sample-tokens", "0"]
    assert main(["train", "--recipe", str(tiny), "--out", str(out), *options]) == 0
    return out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_teaches_with_examples(name, capsys):
    assert main(["help", *name.split()]) == 0
    out = capsys.readouterr().out
    assert f"temper {name}" in out.split("\noptions:")[0].split("\n", 2)[2]
    assert max(map(len, out.splitlines())) <= 80
    # Help is read from the source; the options that are understood are the parser's own.
    with pytest.raises(SystemExit) as stopped:
        _call(name, ["--help"])
    assert stopped.value.code == 0
    listed = {flag for option in usage(*function_of(name)).options if not option.is_positional for flag in option.flags}
    # Tyro puts names at the start of a line in a box, and two spaces before what it says of them.
    rows = re.findall(r"^\W (-.*)", capsys.readouterr().out, re.MULTILINE)
    names = {flag for row in rows for flag in re.findall(r"(?:^|, )(--\w[\w.-]*)", row.split("  ")[0])}
    # --import is taken before the parser sees it, by the commands that build models.
    assert ("--import" in listed) == (function_of(name)[0] in BUILDERS)
    assert names - {"--help"} == listed - {"--import"}


def test_help_has_the_values_of_a_recipe(capsys):
    assert main(["train", "--recipe", "table1-cpu", "--help"]) == 0
    out = capsys.readouterr().out
    recipe = load("table1-cpu")
    assert f"--model.depth INT         the number of blocks. (default: {recipe.model.depth})" in out
    assert f"(default: {recipe.train.batch_tokens})" in out


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"temper {temper.__version__}\n"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("tr", {"train"}),
        ("eval ", {"bpb", "core"}),
        ("train --model.pre", {"--model.preset"}),
        ("train --train.parallel f", {"fsdp"}),
        ("compare --recipe cpu-sm", {"cpu-smoke", "cpu-small"}),
        ("data download ", {"climbmix", "books", "--shards", "--folder", "--source", "--json", "--no-json", "--help"}),
        ("help comp", {"compare", "compress", "completion"}),
    ],
)
def test_bash_completes(words, expected, bash_script):
    typed = shlex.join(["temper", *words.split(" ")])
    code = f'COMP_WORDS=({typed}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _temper; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", f"{bash_script}\n{code}"], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == expected


@pytest.fixture(scope="module")
def bash_script():
    text = completion.script("bash")
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    return text


def test_other_shells_complete_the_same():
    # Neither shell need be here; zsh runs bash's function.
    assert completion.script("zsh").split("\n", 1)[1] == completion.script("bash")
    fish = completion.script("fish").splitlines()
    assert any("-l train.parallel -x -a 'ddp" in line for line in fish)
    assert all(line.startswith("complete -c temper ") for line in fish)


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
    words = "main(['--help']); main(['--version']); main(['train', '--help']); main(['completion', 'bash'])"
    code = f"import sys; from temper_lab.cli import main; {words}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_train_without_a_recipe_or_a_folder(capsys, tmp_path):
    assert main(["train", "--out", str(tmp_path)]) == 2
    assert "--recipe is missing; expected a TOML file or one of ablations-cpu" in capsys.readouterr().err
    assert main(["train", "--recipe", "cpu-smoke"]) == 2
    assert "--out is missing" in capsys.readouterr().err
    assert main(["train", "--resume"]) == 1
    assert "holds no run to resume" in capsys.readouterr().err
    assert main(["train", "--model.prest", "mhc"]) == 2
    assert "there is no option --model.prest; did you mean --model.preset" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--recipe", "cpu-smoke", "--model.preset", "temper-pc"])
    assert stopped.value.code == 2
    assert "temper-cp" in capsys.readouterr().err


def test_train_says_on_stdout_what_came_of_it(finished, tiny, capsys):
    bpbs = [json.loads(line)["val_bpb"] for line in (finished / "metrics.jsonl").read_text().splitlines()]
    # A finished run has nothing left to do, and tells its result again.
    options = ["--train.steps", "3", "--train.val-every", "1", "--train.sample-tokens", "0"]
    words = ["train", "--recipe", str(tiny), "--out", str(finished), "--resume", *options]
    assert main(words) == 0
    tokens = 3 * load(tiny).train.batch_tokens
    line = f"bpb {bpbs[-1]:.4f}, 3 steps, {tokens:,} tokens, model {finished / 'model'}\n"
    assert capsys.readouterr().out == line
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["status"], found["bpb"], found["best_bpb"]) == ("finished", bpbs[-1], min(bpbs))
    assert (found["steps"], found["tokens"], found["model"]) == (3, tokens, str(finished / "model"))


def test_json_is_all_there_is_on_stdout(finished, corpus_folder, tmp_path, capsys):
    def said(*words):
        assert main([*words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    sampled = said("sample", "--model", str(finished), "--prompt", "the people", "--num", "2", "--max-tokens", "4")
    assert [row["text"].startswith("the people") for row in sampled["samples"]] == [True, True]
    info = said("data", "info", "--corpus", str(corpus_folder), "--batches", "1")
    assert (info["train"]["documents"], info["val"]["documents"]) == (38, 2)
    assert info["mixing"]["batches"] == 1
    made = said(
        "tokenizer", "train", "--out", str(tmp_path / "t"), "--corpus", str(corpus_folder), "--vocab-size", "280"
    )
    read = said("tokenizer", "info", "--path", str(tmp_path / "t"), "--text", "law")
    assert made["vocab_size"] == read["vocab_size"] == 280
    assert read["fingerprint"] == made["fingerprint"]
    assert read["tokens"]
    exported = said("export", "--model", str(finished), "--out", str(tmp_path / "e"))
    assert (exported["folder"], exported["format"]) == (str(tmp_path / "e"), "hf")
    more = ["--model", str(finished), "--preset", "temper-cp", "--streams", "8", "--out", str(tmp_path / "u")]
    grown = said("upcycle", *more)
    assert grown["parameters"] > exported["parameters"]
    assert grown["largest_difference"] < 1e-4


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


def test_the_loader_of_a_recipe_is_measured(tiny, corpus_folder, tmp_path, capsys, monkeypatch):
    path, made = tmp_path / "whole.toml", []
    data = "cut_long = false\nmax_chars = 0\nin_memory_mb = 0\nshuffle_mb = 3\nnum_shards = 2"
    path.write_text(f'base = "{tiny}"\n[data]\n{data}\n[train]\nseed = 5\n')
    monkeypatch.setattr(loader, "Reader", lambda *given, **options: made.append(options) or Reader(*given, **options))
    words = ["data", "info", "--recipe", str(path), "--batches", "2", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fingerprint"] == open_corpus(corpus_folder, val_fraction=0.1, max_chars=None).fingerprint
    sizes = {"in_memory_bytes": 0, "shuffle_bytes": 3e6}
    assert made == [{"rank": 0, "world": 2, "seed": 5, "max_ids": None, **sizes}]
    mixing = found["mixing"]
    assert (mixing["rows"], mixing["context"], mixing["cut_long"]) == (4, 32, False)
    # Every document is one piece, so that 36 of them are equally likely.
    assert mixing["documents"] >= 4
    assert mixing["independent"] == pytest.approx(36 * (1 - (35 / 36) ** mixing["documents"]), rel=0.01)
    # Other options replace the recipe's.
    assert main([*words, "--shuffle-mb", "7", "--context", "16", "--rows", "2"]) == 0
    assert made[1] == made[0] | {"shuffle_bytes": 7e6}
    assert {"rows": 2, "context": 16}.items() <= json.loads(capsys.readouterr().out)["mixing"].items()


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
