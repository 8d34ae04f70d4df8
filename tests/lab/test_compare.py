"""`temper compare`: grids that survive everything and give the same results."""

import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from core_bundles import write_bundle
from processes import error_of
from studies import loaded, run_entry
from studies import results as made_up

from temper_lab.cli import main
from temper_lab.recipe import Recipe
from temper_lab.study import live
from temper_lab.study.runner import Runner
from temper_lab.train import run_dir
from temper_lab.train.checkpoint import latest
from temper_lab.train.run_dir import RunFolder
from temper_lab.train.trainer import train

FORKS = Path(__file__).with_name("forks.py")
KEYS = [f"{label}-s{seed}" for label in ("residual-n1", "temper-cp-rank1-n2") for seed in (0, 1)]


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    """A launcher whose runs need not import torch, each, for seconds."""
    path = tmp_path_factory.mktemp("forks") / "socket"
    words = [sys.executable, str(FORKS), str(path)]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ) as server:
        assert server.stdout.readline() == "ready\n"
        yield shlex.join(words)
        server.kill()


def command(tiny, out, launch, *options):
    words = ["compare", "--recipe", str(tiny), "--out", str(out), "--methods", "residual,temper-cp:rank=1"]
    words += ["--streams", "2", "--seeds", "0", "1", "--train.steps", "24", "--train.sample-tokens", "0"]
    return [*words, "--launch", launch, *options]


def start(launch, words):
    """The command as a process; killed, it is killed."""
    return subprocess.Popen([*shlex.split(launch), "-m", "temper_lab", *words], stderr=subprocess.PIPE, text=True)


def until(condition, process=None):
    end = time.monotonic() + 120
    while not condition():
        assert process is None or process.poll() is None, process.stderr.read()
        assert time.monotonic() < end
        time.sleep(0.003)


def steps(out, key):
    return len(run_dir.read_log(out / "runs" / key / "metrics.jsonl"))


def read(out):
    return json.loads((out / "results.json").read_text())


def lasting(out):
    """The results without what the machine decides, and without the name of the folder."""
    text = (out / "results.json").read_text().replace(str(out), "OUT")
    found = json.loads(text)
    for name in ("machine", "cost"):
        del found[name]
    for run in found["runs"]:
        del run["timing"]
    return found


@pytest.fixture(scope="module")
def unbroken(tiny, launch, tmp_path_factory):
    out = tmp_path_factory.mktemp("studies") / "unbroken"
    assert main(command(tiny, out, launch, "--jobs", "2")) == 0
    return out


def copy_of(study, folder):
    shutil.copytree(study, folder)
    return folder


def test_what_a_study_leaves_behind(unbroken):
    assert {path.name for path in unbroken.iterdir()} == {
        ".lock",
        "logs",
        "results.json",
        "runs",
        "study.json",
        "tokenizer",
    }
    found = read(unbroken)
    assert found["command"].endswith("--train.steps 24 --train.sample-tokens 0")
    assert (found["methods"], found["streams"], found["seeds"]) == (["residual", "temper-cp:rank=1"], [2], [0, 1])
    assert [run["key"] for run in found["runs"]] == KEYS
    assert sorted(path.name for path in (unbroken / "runs").iterdir()) == sorted(KEYS)
    for run in found["runs"]:
        rows = run_dir.read_log(unbroken / "runs" / run["key"] / "metrics.jsonl")
        assert (run["status"], run["step"], run["steps"], run["tokens"]) == ("finished", 24, 24, 24 * 256)
        assert run["train"]["loss"] == [row["loss"] for row in rows]
        assert run["val"]["step"] == [4, 8, 12, 16, 20, 24]
        assert run["final"]["bpb"] == rows[-1]["val_bpb"] < run["val"]["bpb"][0]
        assert run["final"]["train_loss"] == pytest.approx((rows[-1]["loss"] + rows[-2]["loss"]) / 2)
        assert run["timing"]["seconds"] > 0
        names = ("step", "res_off_diagonal", "composite_gain", "composite_backward_gain", "stream_similarity")
        mixing = {name: [row[name] for row in rows if "val_bpb" in row] for name in names if name in rows[-1]}
        # A residual run has one stream, so there is nothing to mix.
        assert run.get("routing") == (None if run["preset"] == "residual" else mixing)
        assert len(mixing) == (1 if run["preset"] == "residual" else 5)
    last = found["runs"][-1]
    assert (last["preset"], last["options"], last["label"]) == ("temper-cp", {"rank": 1}, "temper-cp-rank1")
    # The same backbone and the same first batch, whose branches give nothing yet.
    first, second = (found["runs"][index]["train"]["loss"][0] for index in (0, 2))
    assert first == pytest.approx(second, rel=1e-5)
    assert first != found["runs"][1]["train"]["loss"][0]


def test_the_cost_of_a_step_is_measured_side_by_side(unbroken):
    cost = read(unbroken)["cost"]
    assert [(row["method"], row["streams"]) for row in cost["rows"]] == [("residual", 1), ("temper-cp:rank=1", 2)]
    assert cost["setting"]["rounds"] >= 5
    assert cost["setting"]["tokens"] == 256
    assert cost["rows"][0]["ratio"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    for row in cost["rows"]:
        assert 0 < row["step_ms"]["low"] <= row["step_ms"]["median"] <= row["step_ms"]["high"]


def test_the_closing_table(unbroken, capsys):
    found = read(unbroken)
    residual, routed = live.rows(loaded(found))
    finals = [run["final"]["bpb"] for run in found["runs"]]
    assert residual.final == pytest.approx(sum(finals[:2]) / 2)
    assert residual.sd == pytest.approx(abs(finals[0] - finals[1]) / 2**0.5)
    assert routed.gap == pytest.approx((finals[2] - finals[0] + finals[3] - finals[1]) / 2)
    live.show(loaded(found))
    out = capsys.readouterr().out
    for text in ("temper-cp:rank=1", f"{routed.final:.4f} ± ", f"{routed.added:,}", "(1.00x)"):
        assert text in out


def test_results_of_before_there_were_axes(unbroken, capsys):
    found = read(unbroken)
    assert found.pop("vary") == {}
    for run in found["runs"]:
        assert run.pop("vary") == {}
    assert live.rows(loaded(found)) == live.rows(loaded(read(unbroken)))
    live.show(loaded(found))
    assert "temper-cp:rank=1" in capsys.readouterr().out


def test_given_again_nothing_is_run_again(unbroken, launch, capsys, monkeypatch):
    before = (unbroken / "results.json").read_bytes()
    monkeypatch.setattr("temper_lab.study.runner.Runner._spawn", None)
    monkeypatch.setattr("temper_lab.study.cost.measure", None)
    assert main(["compare", "--out", str(unbroken)]) == 0
    assert str(unbroken / "results.json") in capsys.readouterr().out
    assert main(["compare", "--out", str(unbroken), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(before)
    assert (unbroken / "results.json").read_bytes() == before


CLAIM = """
[[compare.claims]]
name = "routing-helps"
text = "a made-up claim"
kind = "not-worse"
methods = ["temper-cp:rank=1"]
against = "residual"
margin = {margin}
streams = [2]
"""


def test_claims_that_come_late_say_so_and_stay_as_they_were(tiny, unbroken, launch, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("temper_lab.study.runner.Runner._spawn", None)
    monkeypatch.setattr("temper_lab.study.cost.measure", None)
    out, claimed = copy_of(unbroken, tmp_path / "claims"), tmp_path / "claims.toml"
    assert read(out)["claims"] == []
    grid = '[compare]\nmethods = ["residual", "temper-cp:rank=1"]\nstreams = [2]\nseeds = [0, 1]\n'
    claimed.write_text(f"{tiny.read_text()}\n{grid}{CLAIM.format(margin=10)}")
    assert main(command(claimed, out, launch)) == 0
    printed = capsys.readouterr().out
    assert "1 claim: 1 shown, 0 refuted, 0 open." in printed
    assert "Shown: temper-cp:rank=1 is not worse than residual by more than 10 bpb at N = 2" in printed
    (claim,) = read(out)["claims"]
    assert claim["record"] | {"added": ""} == {"added": "", "runs_started": 4, "runs_finished": 4}
    before = (out / "results.json").read_bytes()
    assert main(["compare", "--out", str(out)]) == 0
    assert (out / "results.json").read_bytes() == before
    claimed.write_text(f"{tiny.read_text()}\n{grid}{CLAIM.format(margin=0.1)}")
    assert main(command(claimed, out, launch)) == 1
    assert "margin was 10.0, is 0.1. A claim stays as it was written" in capsys.readouterr().err
    assert (out / "results.json").read_bytes() == before


def test_killed_at_a_random_point_and_given_again_it_is_the_unbroken_study(tiny, unbroken, launch, tmp_path):
    out, total = tmp_path / "killed", random.randint(0, 60)
    process = start(launch, command(tiny, out, launch, "--jobs", "1", "--no-cost"))
    until(lambda: (out / "runs").exists() and sum(steps(out, key) for key in KEYS) >= total, process)
    process.kill()
    process.communicate()
    # At once: what is still running saves, and then goes on here.
    assert main(["compare", "--out", str(out), "--launch", launch, "--jobs", "2", "--no-cost"]) == 0, total
    assert lasting(out) == lasting(unbroken)


def test_a_run_that_is_killed_does_not_stop_the_others(tiny, unbroken, launch, tmp_path):
    out, step = tmp_path / "killed", random.randint(1, 12)
    process = start(launch, command(tiny, out, launch, "--jobs", "2", "--no-cost"))
    until(lambda: steps(out, KEYS[2]) >= step, process)
    (child,) = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if is_starter(pid, out, KEYS[2])]
    os.kill(child, signal.SIGKILL)
    error = error_of(process)
    assert process.returncode == 1
    assert f"{KEYS[2]} killed: killed by SIGKILL at step" in error
    assert f"again with: temper compare --out {out}" in error
    assert [run["status"] for run in read(out)["runs"]] == ["finished", "finished", "killed", "finished"]
    assert main(["compare", "--out", str(out), "--launch", launch, "--no-cost"]) == 0
    assert lasting(out) == lasting(unbroken)


def is_starter(pid, out, key):
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return False
    return str(FORKS) in words and str(out) in words and key in words


def test_told_to_stop_the_runs_save_and_without_the_study_they_stop_too(tiny, launch, tmp_path):
    out, key = tmp_path / "stopped", KEYS[0]
    options = ["--train.steps", "100000", "--train.val-every", "0", "--train.save-every", "0", "--jobs", "1"]
    process = start(launch, command(tiny, out, launch, *options))
    until(lambda: steps(out, key) >= 2, process)
    assert main(command(tiny, out, launch, *options)) == 1
    process.send_signal(signal.SIGTERM)
    error = error_of(process)
    assert process.returncode == 128 + signal.SIGTERM
    assert f"continue with: temper compare --out {out}" in error
    found = read(out)["runs"]
    assert [run["status"] for run in found] == ["interrupted", "waiting", "waiting", "waiting"]
    assert found[0]["step"] == steps(out, key) == latest(out / "runs" / key / "checkpoints")[0].step

    before = steps(out, key)
    process = start(launch, ["compare", "--out", str(out), "--launch", launch])
    until(lambda: steps(out, key) > before, process)
    process.kill()
    process.communicate()
    run = RunFolder(out / "runs" / key)
    until(lambda: not run.is_claimed())
    assert run.read()["status"] == "interrupted"
    assert latest(run.checkpoints)[0].step == steps(out, key) > before


def test_two_at_once_are_refused(unbroken, capsys):
    with RunFolder(unbroken).claimed():
        assert main(["compare", "--out", str(unbroken)]) == 1
    assert "another process" in capsys.readouterr().err


def test_failed_skipped_and_added_runs(tiny, launch, unbroken, tmp_path, capsys):
    out = copy_of(unbroken, tmp_path / "more")
    (out / "runs" / "mhc-n2-s0").write_text("not a folder")
    words = ["compare", "--out", str(out), "--seeds", "0", "--launch", launch, "--jobs", "2", "--no-cost"]
    assert main([*words, "--methods", "mhc", "mhc-lite", "temper-cp:init_std=1e30"]) == 1
    error = capsys.readouterr().err
    runs = {run["key"]: run for run in read(out)["runs"]}
    assert runs["mhc-n2-s0"]["status"] == "failed"
    assert runs["mhc-n2-s0"]["reason"] in error
    assert "is a file; expected a folder" in runs["mhc-n2-s0"]["reason"]
    assert runs["temper-cp-init_std1e+30-n2-s0"]["status"] == "failed"
    assert "step 1: " in runs["temper-cp-init_std1e+30-n2-s0"]["reason"]
    assert runs["mhc-lite-n2-s0"]["status"] == "finished"
    assert [lasting(unbroken)["runs"][index] for index in (0, 3)] == [
        run for run in lasting(out)["runs"] if run["key"] in (KEYS[0], KEYS[3])
    ]

    # Tried again, and one of them works now; mhc-lite at N=8 is known to be too much beforehand.
    (out / "runs" / "mhc-n2-s0").unlink()
    assert main([*words, "--methods", "mhc-lite", "--streams", "8"]) == 1
    runs = {run["key"]: run for run in read(out)["runs"]}
    assert runs["mhc-n2-s0"]["status"] == "finished"
    skipped = runs["mhc-lite-n8-s0"]
    assert (skipped["status"], skipped["step"], skipped["final"], skipped["flops_per_token"]) == (
        "skipped",
        0,
        None,
        None,
    )
    assert f"{skipped['parameters']['added']:,} in 2 sites" in skipped["reason"]
    assert not (out / "runs" / "mhc-lite-n8-s0").exists()
    assert read(out)["command"].count(" && ") == 2


def test_varied_fields_extend_a_study_and_go_on_where_they_were(launch, unbroken, tmp_path, capsys):
    words = ["--seeds", "0", "--vary", "model.depth=1,2", "--launch", launch, "--no-cost"]
    whole, out = (copy_of(unbroken, tmp_path / name) for name in ("whole", "killed"))
    assert main(["compare", "--out", str(whole), *words]) == 0
    assert capsys.readouterr().out.splitlines()[0].split()[:4] == ["method", "N", "depth", "added"]
    found = read(whole)
    added = ["residual-n1-s0-depth2", "temper-cp-rank1-n2-s0-depth2"]
    # The depth that the recipe has is no other run.
    assert [run["key"] for run in found["runs"]] == [*KEYS[:2], added[0], *KEYS[2:], added[1]]
    assert found["vary"] == {"model.depth": [1, 2]}
    assert [run["vary"] for run in found["runs"][-2:]] == [{}, {"model.depth": 2}]
    assert found["recipe"]["model"]["depth"] == 1
    assert found["runs"][-1]["parameters"]["added"] > 2 * found["runs"][-2]["parameters"]["added"]
    assert RunFolder(whole / "runs" / added[1]).read()["recipe"]["model"]["depth"] == 2
    unvaried = [run for run in lasting(whole)["runs"] if run["key"] in KEYS]
    assert unvaried == lasting(unbroken)["runs"]

    process = start(launch, ["compare", "--out", str(out), *words, "--jobs", "1"])
    total = random.randint(1, 40)
    until(lambda: sum(steps(out, key) for key in added) >= total, process)
    process.kill()
    process.communicate()
    assert main(["compare", "--out", str(out), "--launch", launch, "--no-cost"]) == 0, total
    assert lasting(out)["runs"] == lasting(whole)["runs"]
    capsys.readouterr()
    assert main(["compare", "--out", str(out), *words[:4], "--dry-run"]) == 0
    assert "0 runs to train" in capsys.readouterr().out


def test_means_and_differences_are_of_equal_settings():
    runs = [
        run_entry("residual", 4, 0, bpb=2.0),
        run_entry("residual", 4, 1, bpb=2.1),
        run_entry("residual", 4, 0, bpb=1.8, vary={"model.depth": 6}),
        run_entry("mhc", 4, 0, bpb=1.9),
        run_entry("mhc", 4, 1, bpb=2.05),
        run_entry("mhc", 4, 0, bpb=1.95, vary={"optim.routing_lr": 0.5}),
        run_entry("mhc", 4, 0, bpb=1.6, vary={"model.depth": 6}),
        run_entry("mhc", 4, 1, bpb=1.5, vary={"model.depth": 6}),
        run_entry("mhc", 4, 0, bpb=1.7, vary={"model.depth": 6, "optim.routing_lr": 0.5}),
    ]
    quartiles = {"median": 2.0, "low": 2.0, "high": 2.0}
    cost = {"rows": [{"method": "mhc", "streams": 4, "step_ms": quartiles, "ratio": quartiles}]}
    found = made_up(runs, cost=cost)
    assert found["vary"] == {"model.depth": [3, 6], "optim.routing_lr": [0.0125, 0.5]}
    rows = [(row.method, *row.fields.values(), row.final, row.gap, bool(row.cost)) for row in live.rows(loaded(found))]
    assert rows == [
        ("residual", 3, None, pytest.approx(2.05), 0.0, False),
        ("residual", 6, None, 1.8, 0.0, False),
        ("mhc", 3, 0.0125, pytest.approx(1.975), pytest.approx(-0.075), True),
        # A residual network has no routing: its runs are the same at every learning rate of it.
        ("mhc", 3, 0.5, 1.95, pytest.approx(-0.05), True),
        # The time of a step was measured with three blocks, and seed 1 has no residual run.
        ("mhc", 6, 0.0125, pytest.approx(1.55), pytest.approx(-0.2), False),
        ("mhc", 6, 0.5, 1.7, pytest.approx(-0.1), False),
    ]


def test_core_is_kept_in_the_folders_of_the_runs(unbroken, tmp_path, capsys, monkeypatch):
    out = copy_of(unbroken, tmp_path / "core")
    write_bundle(tmp_path / "bundle", count=6)
    options = ["--core", str(tmp_path / "bundle"), "--max-per-task", "5"]
    assert main(["compare", "--out", str(out), *options]) == 0
    runs = read(out)["runs"]
    for run in runs:
        assert run["core"]["CORE"] is None
        assert {row["items"] for row in run["core"]["tasks"].values()} == {5}
        assert set(run["core"]["tasks"]) == {"arc_easy", "winograd", "squad"}
    monkeypatch.setattr("temper_lab.eval.core.evaluate_task", None)
    for again in ([], options):
        assert main(["compare", "--out", str(out), *again]) == 0
        assert read(out)["runs"] == runs
    (tmp_path / "bundle" / "core.yaml").unlink()
    assert main(["compare", "--out", str(out), *options]) == 1
    assert "core.yaml" in capsys.readouterr().err


def test_runs_of_another_recipe_or_tokenizer_are_refused(tiny, unbroken, launch, tmp_path, capsys):
    assert main(command(tiny, unbroken, launch, "--train.steps", "25")) == 1
    assert "is a study of another recipe: train.steps was 24, is 25" in capsys.readouterr().err
    out = copy_of(unbroken, tmp_path / "foreign")
    (out / "study.json").unlink()
    assert main(["compare", "--out", str(out)]) == 1
    assert "--recipe begins one" in capsys.readouterr().err
    assert main(command(tiny, out, launch, "--optim.matrix-lr", "0.4")) == 1
    assert "is a run of another recipe: optim.matrix_lr was 0.5, is 0.4" in capsys.readouterr().err
    assert not (out / "study.json").exists()
    # Another number of threads, and a tokenizer of the same content somewhere else, are nobody's recipe.
    run = RunFolder(out / "runs" / KEYS[0])
    recipe = run.read()["recipe"]
    recipe["train"]["threads"], recipe["tokenizer"]["path"] = 2, "elsewhere"
    run.write(recipe=recipe)
    assert main(command(tiny, out, launch, "--no-cost")) == 0
    assert lasting(out) == lasting(unbroken)
    tokenizer = json.loads((out / "tokenizer" / "tokenizer.json").read_text())
    tokenizer["model"]["merges"].pop()
    (out / "tokenizer" / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert main(command(tiny, out, launch)) == 1
    assert "has another tokenizer than" in capsys.readouterr().err


def test_other_data_are_refused(tiny, unbroken, launch, corpus_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Runner, "_spawn", None)
    out = copy_of(unbroken, tmp_path / "other")
    study, text = out / "study.json", (out / "study.json").read_text()
    more = ["compare", "--out", str(out), "--seeds", "2", "--no-cost"]
    path = corpus_folder / "07.txt"
    with monkeypatch.context() as patch:
        patch.setattr("temper_lab.data.loader.ORDER_VERSION", 3)
        assert main(more) == 1
        assert f"{study} holds runs of other data" in (error := capsys.readouterr().err)
        assert "order of batches was 2, is 3. Restore the data, or the version of temper that" in error
        # Without anything to train, the corpus need not even be there.
        assert main(["compare", "--out", str(out), "--no-cost"]) == 0
    before = path.read_text()
    path.write_text(f"{before} more")
    try:
        assert main(more) == 1
        assert "the corpus (names, sizes and ends of its files) was" in capsys.readouterr().err
        assert main([*more, "--dry-run"]) == 1
        # Not even a run that the study has begun by then is trained on them.
        again = ["temper_lab.study.worker", str(out), KEYS[0], "1"]
        pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen([*shlex.split(launch), "-m", *again], **pipes) as process:
            assert process.wait() == 1
            assert "the data are not those of the study any more: the corpus" in process.stderr.read()
        with pytest.raises(ValueError, match="was trained on other data, so it is not resumed: the corpus"):
            train(Recipe.from_dict(RunFolder(out / "runs" / KEYS[0]).recipe(), ""), out / "runs" / KEYS[0], resume=True)
    finally:
        path.write_text(before)
    # A study of an earlier version, with runs that do not say it either.
    data = json.loads(text)["data"]
    study.write_text(json.dumps(json.loads(text) | {"data": None}))
    assert main([*more, "--dry-run"]) == 0
    for key in KEYS:
        RunFolder(out / "runs" / key).write(data=None)
    assert main(["compare", "--out", str(out), "--no-cost"]) == 0
    assert main(more) == 1
    record = f'"data": {json.dumps(data)}'
    assert (
        "does not record the data that its runs were trained on, so they cannot be compared with others. If you "
        in (error := capsys.readouterr().err)
    )
    assert f"write {record} into {study}; otherwise start anew with another --out" in error
    study.write_text(text)
    assert main([*more, "--dry-run"]) == 0


def test_one_run_through_the_interpreter_itself(tiny, unbroken, tmp_path):
    out = tmp_path / "plain"
    words = command(tiny, out, "", "--no-cost")
    words[words.index("--methods") + 1] = "residual"
    words[words.index("--seeds") + 1 : words.index("--train.steps")] = ["0"]
    assert main([*words, "--jobs", "1"]) == 0
    assert lasting(out)["runs"] == lasting(unbroken)["runs"][:1]
    assert "finished 24 steps" in (out / "logs" / f"{KEYS[0]}.txt").read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--methods", "mch"], "unknown method 'mch'. Did you mean 'mhc'"),
        (["--methods", ","], "no method is named"),
        (["--methods", "temper-cp:rnk=2"], "temper-cp:rnk=2 at N=4: unknown option of the preset temper-cp 'rnk'"),
        (["--methods", "temper-cp:rank"], "'rank' is not an override; expected OPTION=VALUE"),
        (["--methods", "temper-cp:rank=two/three"], "'two/three' is not a value"),
        (["--methods", "temper-cp:rank=1:rank=2"], "has rank twice"),
        (["--methods", "temper-tucker:rank=9x9"], "temper-tucker:rank=9x9 at N=4: "),
        (["--streams", "1"], "streams has 1; expected whole numbers >= 2"),
        (["--seeds", "-1"], "seeds has -1; expected whole numbers >= 0"),
        (["--jobs", "-2"], "--jobs is -2"),
        (["--launch", "no-such-program -x"], "there is no program 'no-such-program'"),
        (["--core", "nowhere"], "there is no nowhere"),
        (["--max-per-task", "3"], "--max-per-task needs --core"),
        (["--model.preset", "mhc"], "--model.preset is every run's own here; use --methods"),
        (["--train.seed", "3"], "use --seeds"),
        (["--model.router", '{"rank": 2}'], "use --methods, such as temper-cp:rank=8"),
        (["--data.corpus", "nowhere"], "nowhere"),
    ],
)
def test_bad_input_leaves_nothing_behind(options, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", "--recipe", "cpu-smoke", "--out", "study", "--streams", "4", *options]) == 1
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_folders_that_are_no_studies(tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    assert main(["compare", "--recipe", "demo", "--out", str(tmp_path)]) == 1
    assert "is not empty and holds no study" in capsys.readouterr().err
    assert main(["compare", "--recipe", "demo", "--out", str(tmp_path / "file")]) == 1
    assert "is a file" in capsys.readouterr().err
    assert main(["compare", "--out", str(tmp_path / "none")]) == 2
    assert "--recipe is missing" in capsys.readouterr().err
    assert main(["compare", "--recipe", "demo"]) == 2
    assert "--out is missing" in capsys.readouterr().err
    (tmp_path / "study.json").write_text("{}")
    assert main(["compare", "--out", str(tmp_path)]) == 1
    assert "study.json has format None" in capsys.readouterr().err
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["file", "study.json"]


def test_finished_runs_of_another_study_are_taken_over(tiny, unbroken, launch, tmp_path, capsys, monkeypatch):
    spawned, spawn = [], Runner._spawn
    monkeypatch.setattr(Runner, "_spawn", lambda self, key: spawned.append(key) or spawn(self, key))
    part = json.loads((unbroken / "results.json").read_text())
    part["runs"][1] |= {"status": "killed", "final": None}
    known, out = tmp_path / "known.json", tmp_path / "study"
    known.write_text(json.dumps(part))
    words = command(tiny, out, launch, "--no-cost", "--known", str(known))
    assert main([*words, "--optim.matrix-lr", "0.4"]) == 1
    assert "optim.matrix_lr was 0.5, is 0.4" in capsys.readouterr().err
    assert not out.exists()
    assert main([*words, "--dry-run"]) == 0
    assert "1 runs to train" in capsys.readouterr().out
    assert main(words) == 0
    assert "3 of 4 runs taken over" in capsys.readouterr().err
    assert spawned == [KEYS[1]]
    whole, expected = read(out), read(unbroken)
    assert str(known) not in whole["command"]
    source = {name: part[name] for name in ("study", "commit", "versions", "machine", "tokenizer")}
    assert [run.pop("source") for run in whole["runs"]] == [source, None, source, source]
    assert [run.pop("source") for run in expected["runs"]] == [None] * 4
    for run in (whole["runs"][1], expected["runs"][1]):
        del run["timing"]
    assert whole["runs"] == expected["runs"]
    assert [(row.finished, row.asked) for row in live.rows(loaded(whole))] == [(2, 2), (2, 2)]
    # Models are only where they were trained, and the option is needed only once.
    assert [path.name for path in (out / "runs").iterdir()] == [KEYS[1]]
    before = (out / "results.json").read_bytes()
    write_bundle(tmp_path / "bundle", count=4)
    assert main(["compare", "--out", str(out), "--no-cost"]) == 0
    assert (out / "results.json").read_bytes() == before
    assert main(["compare", "--out", str(out), "--no-cost", "--core", str(tmp_path / "bundle")]) == 0
    assert "3 runs that were taken over have no model here" in capsys.readouterr().err
    assert [run["core"] is None for run in read(out)["runs"]] == [True, False, True, True]
    assert spawned == [KEYS[1]]
    data = part["data"]
    assert data == whole["data"] == RunFolder(out / "runs" / KEYS[1]).read()["data"]
    for damage, words in (
        ({"data": None}, f'If you know that they are these, write "data": {json.dumps(data)} into {known}; otherwise'),
        ({"data": data | {"order": 1}}, "the version of the order of batches was 1, is 2. Restore the data, or the"),
        ({"data": data | {"content": "x"}}, f"the content of the corpus was x, is {data['content']}. Restore"),
        ({"runs": [part["runs"][0] | {"streams": 3}]}, "is not of residual, N=1, seed 0; expected what its key says"),
        ({"runs": [part["runs"][2] | {"parameters": {"added": 1}}]}, "has 1 routing parameters, here it would have"),
        ({"tokenizer": "other"}, "had another tokenizer"),
        ({"format": "x"}, "format"),
    ):
        known.write_text(json.dumps(part | damage))
        assert main(["compare", "--out", str(copy_of(unbroken, tmp_path / "x")), "--known", str(known)]) == 1
        assert words in capsys.readouterr().err
        shutil.rmtree(tmp_path / "x")
