"""`temper compress`: folders that load everywhere, reports that say what was measured, promises and refusals."""

import json
import sys
from pathlib import Path

import pytest
import torch

import temper
from temper.config import HEADS
from temper_lab.cli import main
from temper_lab.compress import Settings, compress
from temper_lab.data import open_corpus
from temper_lab.method import parse_rank, show_rank
from temper_lab.model import GPT, ModelConfig
from temper_lab.recipe import Recipe
from temper_lab.tokenizer import Tokenizer
from temper_lab.train.model_dir import load, save_model

SMALL = {"depth": 1, "head_dim": 32, "context": 24, "preset": "mhc", "num_streams": 2}


@pytest.fixture(scope="module")
def tokenizer(corpus_folder):
    return Tokenizer.train(open_corpus(corpus_folder).texts(), 300)


@pytest.fixture(scope="module")
def models(tokenizer, tmp_path_factory):
    """Makes folders of models whose routing is far from where it starts."""

    def make(**changes) -> Path:
        config = ModelConfig(**{**SMALL, "vocab_size": tokenizer.vocab_size, **changes})
        torch.manual_seed(0)
        model = GPT(config)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                scale = 0.5 if "_site" in name else 0.1
                parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
        folder = tmp_path_factory.mktemp("model") / "model"
        save_model(folder, config.to_dict(), model.state_dict(), {"tokenizer.json": tokenizer.to_json()})
        return folder

    return make


@pytest.fixture(scope="module")
def mhc(models):
    return models()


def run(mhc, out, corpus=None, **options):
    options = {"to": "tucker", "batches": 2, "rows": 2, "device": "cpu", "calibrate_tokens": 500, **options}
    return compress(Settings(model=mhc, out=out, corpus=None if corpus is None else str(corpus), **options))


IDS = torch.randint(300, (2, 24), generator=torch.Generator().manual_seed(3))


def logits(folder):
    with torch.no_grad():
        return load(folder)[0](IDS)


def test_full_rank_changes_nothing(mhc, tmp_path):
    report = run(mhc, tmp_path / "out", rank=(2, 64))
    torch.testing.assert_close(logits(tmp_path / "out"), logits(mhc), rtol=0, atol=1e-5)
    assert report["error"] < 1e-5
    assert report["bpb"] == {"before": None, "after": None}
    assert "name a --corpus" in report["note"]
    assert json.loads((tmp_path / "out" / "compress.json").read_text()) == report


def test_calibrated_with_ranks_by_site(mhc, corpus_folder, tmp_path, capsys):
    out = tmp_path / "small"
    options = ["--to", "tucker", "--error", "0.4", "--calibrate", str(corpus_folder), "--calibrate-tokens", "500"]
    sizes = ["--batches", "2", "--rows", "2", "--finetune", "2", "--json", str(tmp_path / "report.json")]
    assert main(["compress", "--model", str(mhc), "--out", str(out), *options, *sizes]) == 0
    printed = capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text())
    assert report == json.loads((out / "compress.json").read_text())
    assert report["error"] <= 0.4
    model, _ = load(out)
    routings = [site.config for site in model.sites()]
    assert routings == model.config.routings()
    assert all(getattr(routing, head).name == "tucker" for routing in routings for head in HEADS)
    assert report["parameters"]["added"]["after"] == model.num_parameters()["routing"]
    assert report["parameters"]["added"]["before"] == load(mhc)[0].num_parameters()["routing"]
    assert report["parameters"]["total"]["after"] == model.num_parameters()["total"]
    assert f"{report['parameters']['added']['after']:,}" in printed
    # What is reported of the saved model is what the saved model has.
    assert main(["eval", "bpb", "--model", str(out), "--corpus", str(corpus_folder), *sizes[:4], "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["bpb"]
    assert report["bpb"]["finetuned"] == pytest.approx(found, abs=1e-9)
    assert report["bpb"]["finetuned"] != report["bpb"]["after"] != report["bpb"]["before"]
    for site in report["sites"]:
        assert set(site["heads"]) == set(HEADS)
        assert site["deviation"]["block"]["ratio_max"] <= 1
        assert all(0 < gap["measured_max"] <= gap["bound_max"] for gap in site["deviation"]["logits"].values())
    # The rest of the lab.
    assert main(["sample", "--model", str(out), "--prompt", "the", "--max-tokens", "4"]) == 0
    assert run(out, tmp_path / "again", to="cp", rank=1)["parameters"]["added"]["before"] == routing_of(out)


def routing_of(folder):
    return load(folder)[0].num_parameters()["routing"]


def test_transformers_hold_it(models, tmp_path, corpus_folder):
    hf = pytest.importorskip("temper_lab.interop.hf")
    from transformers import AutoModelForCausalLM

    routers = {"1": {"res": {"name": "cp", "rank": 1}}}
    given = models(preset="temper-tucker", routers=routers)
    assert main(["export", "--model", str(given), "--out", str(tmp_path / "hf")]) == 0
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert isinstance(theirs, hf.TemperForCausalLM)
    assert theirs.config.model_config() == load(given)[0].config
    with torch.no_grad():
        assert torch.equal(theirs(IDS).logits, logits(given))
    arguments = ["compress", "--model", str(tmp_path / "hf"), "--out", str(tmp_path / "x"), "--rank", "1"]
    assert main(arguments) == 1


@pytest.mark.parametrize("preset", ["kromhc", "mhc-lite", "temper-slim"])
def test_anything_to_anything(preset, models, tmp_path):
    folder = models(preset=preset)
    report = run(folder, tmp_path / "out", to="tt", rank=1, plain=True)
    model = load(tmp_path / "out")[0]
    before = load(folder)[0].config.routing()
    assert model.config.routing().mixer == before.mixer
    assert model.config.routing().gain == before.gain
    assert model.config.routers == {}
    assert report["parameters"]["added"]["after"] == model.num_parameters()["routing"]


def test_names_of_presets(mhc, models, tmp_path):
    for folder, options, name in [
        (mhc, {"rank": (1, 3)}, "temper-tucker"),
        (mhc, {"rank": 2, "to": "cp"}, "temper-cp"),
        (models(preset="kromhc"), {"rank": (1, 3)}, "temper-tucker-krom"),
    ]:
        out = tmp_path / name
        run(folder, out, **options, plain=True)
        config = load(out)[0].config
        assert config.preset == name
        assert set(config.router) <= set(HEADS)


def test_a_budget_and_finetuning_of_everything(mhc, corpus_folder, tmp_path):
    budget = 1000
    report = run(mhc, tmp_path / "a", corpus_folder, to="cp", params=budget, finetune=1, plain=True)
    assert routing_of(tmp_path / "a") == report["parameters"]["added"]["after"] <= budget
    before, after = load(mhc)[0].state_dict(), load(tmp_path / "a")[0].state_dict()
    shared = [name for name in after if "_site" not in name]
    # Only the routing was trained.
    assert all(torch.equal(before[name], after[name]) for name in shared)
    run(mhc, tmp_path / "b", corpus_folder, to="cp", rank=1, finetune=1, finetune_all=True, plain=True)
    after = load(tmp_path / "b")[0].state_dict()
    assert not any(torch.equal(before[name], after[name]) for name in shared)


def test_the_corpus_of_a_run(tiny, tmp_path, corpus_folder, capsys):
    run_folder = tmp_path / "run"
    options = ["--train.steps", "2", "--train.val-every", "0", "--model.preset", "mhc"]
    assert main(["train", "--recipe", str(tiny), "--out", str(run_folder), *options]) == 0
    report = run(run_folder, tmp_path / "out", rank=1)
    assert report["corpus"] == str(corpus_folder)
    assert report["bpb"]["after"] > 0
    # The folder of its model is in the run too.
    assert run(run_folder / "model", tmp_path / "out2", rank=1)["bpb"] == report["bpb"]
    capsys.readouterr()


def test_refusals_write_nothing(mhc, models, corpus_folder, tmp_path, capsys):
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank.txt").write_text("")
    plain, hc = models(preset="residual", num_streams=1), models(preset="hc")
    out = tmp_path / "out"
    cases = [
        (mhc, out, [], "expected one of --rank, --error and --params, got none of them"),
        (mhc, out, ["--rank", "2", "--error", "0.1"], "got --rank and --error together"),
        (mhc, out, ["--rank", "3x3"], "tucker rank 3 of the stream mode (size 2) is out of range: expected 1 to 2"),
        (mhc, out, ["--rank", "two"], "the rank is 'two'; expected a number like 8"),
        (mhc, out, ["--rank", "1.5"], "expected 0 < rank <= 1"),
        (mhc, out, ["--error", "-1"], "--error is -1.0"),
        (mhc, out, ["--params", "10"], "params is 10; expected at least"),
        (mhc, out, ["--params", "0"], "--params is 0"),
        (mhc, full, ["--rank", "1"], "full is not empty"),
        (plain, out, ["--rank", "1"], "only plain residuals"),
        (hc, out, ["--rank", "1"], "per-stream generator"),
        (mhc, out, ["--rank", "1", "--calibrate", str(tmp_path / "empty")], "the folder holds none"),
        (mhc, out, ["--rank", "1", "--calibrate", str(tmp_path / "blank.txt")], "expected"),
        (mhc, out, ["--rank", "1", "--finetune", "3"], "--finetune needs a corpus"),
        (mhc, out, ["--rank", "1", "--finetune-all"], "there are no steps"),
        (mhc, out, ["--rank", "1", "--plain", "--calibrate", str(corpus_folder)], "leave out --calibrate"),
        (mhc, out, ["--to", "dense", "--rank", "1"], "unknown low-rank generator 'dense'"),
        (mhc, out, ["--to", "cp:rank=2", "--rank", "1"], "--to cp:rank=2 has a rank, and --rank is given too"),
        (mhc, out, ["--to", "cp:iters=2"], "expected a rank and nothing else, such as cp:rank=8"),
        (mhc, out, ["--rank", "1", "--context", "99"], "--context is 99"),
        (mhc, out, ["--rank", "1", "--json", str(tmp_path)], "it is a folder"),
        (tmp_path / "none", out, ["--rank", "1"], "there is no model folder"),
    ]
    for model, target, options, message in cases:
        assert main(["compress", "--model", str(model), "--out", str(target), *options]) == 1, options
        error = capsys.readouterr().err
        assert message in error, (options, error)
        assert not out.exists()
        assert [path.name for path in full.iterdir()] == ["file"]


def test_ranks_as_people_write_them():
    assert [parse_rank(text) for text in ("8", "2x12", "2X12x3", "0.1", "1.0")] == [8, (2, 12), (2, 12, 3), 0.1, 1.0]
    assert [show_rank(rank) for rank in (8, (2, 12), [2, 12, 3], 0.1)] == ["8", "2x12", "2x12x3", "0.1"]
    with pytest.raises(ValueError, match="'2by12'; expected a number"):
        parse_rank("2by12")


def test_routers_in_configurations():
    base = {**SMALL, "vocab_size": 50, "depth": 2}
    plain = ModelConfig(**base)
    assert "routers" not in plain.to_dict()
    config = ModelConfig(**base, routers={3: {"generator": "tucker", "rank": (1, 4)}, "0": {"gain": "none"}})
    assert list(config.routers) == ["0", "3"]
    back = ModelConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert back == config
    assert [routing.res.name for routing in config.routings()] == ["dense", "dense", "dense", "tucker"]
    model = GPT(config)
    assert [site.config for site in model.sites()] == config.routings()
    added = sum(map(temper.count_parameters, config.routings()))
    assert model.num_parameters()["routing"] == added
    assert model.flops_per_token() < GPT(plain).flops_per_token()
    assert model.memory_estimate(64)["total"] < GPT(plain).memory_estimate(64)["total"]
    assert config.with_(routers={}).with_routings(config.routings()).routings() == config.routings()
    recipe = {"model": base, "train": {"steps": 1, "batch_tokens": 24, "device_batch_size": 1}}
    one = Recipe.from_dict(recipe)
    two = Recipe.from_dict({**recipe, "model": {**base, "routers": {"1": {"rank": 2, "generator": "cp"}}}})
    assert "routers" not in one.to_dict()["model"]
    assert Recipe.from_dict(two.to_dict()) == two
    assert one.changes(two) == ["model.routers was None, is {'1': {'rank': 2, 'generator': 'cp'}}"]
    for routers, message in [
        ({"4": {}}, "0 to 3"),
        ({"x": {}}, "routers has a site 'x'"),
        ([1], "expected overrides by the number of a site"),
        ({"1": 3}, r"routers\['1'\] is 3"),
        ({"1": {"rnk": 3}}, r"routers\['1'\] .*'rnk'"),
        ({"1": {"num_streams": 3}}, r"routers\['1'\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            ModelConfig(**base, routers=routers)
    with pytest.raises(ValueError, match="expected the same at every site"):
        ModelConfig(**{**base, "preset": "residual"}, routers={"1": {"generator": "dense", "mixer": "sinkhorn"}})


@pytest.fixture(scope="module")
def deepseek(tokenizer, tmp_path_factory):
    """The folder of a tiny DeepSeek-V4 with a tokenizer."""
    pytest.importorskip("transformers.models.deepseek_v4")
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    import deepseek_v4

    from temper_lab.interop.hf import fast_tokenizer

    config = deepseek_v4.tiny().config
    config.vocab_size = tokenizer.vocab_size
    torch.manual_seed(0)
    model = deepseek_v4.DeepseekV4ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "_hc." in name:
                parameter.normal_(0, 0.5)
    folder = tmp_path_factory.mktemp("deepseek") / "model"
    model.save_pretrained(folder)
    fast_tokenizer(tokenizer, context=64).save_pretrained(folder)
    return folder


def test_deepseek(deepseek, corpus_folder, tmp_path, capsys):
    from transformers import AutoModelForCausalLM

    from temper_lab.interop.deepseek import Adapter, save, to_deepseek
    from temper_lab.interop.deepseek import load as load_hf

    theirs = AutoModelForCausalLM.from_pretrained(deepseek)
    with torch.no_grad():
        expected = theirs(IDS).logits
    run(deepseek, tmp_path / "same", rank=(4, 32))
    same = load_hf(tmp_path / "same")
    assert sum(isinstance(module, Adapter) for module in same.modules()) == 6
    with torch.no_grad():
        torch.testing.assert_close(same(IDS).logits, expected, rtol=0, atol=1e-5)
        back = to_deepseek(same)(IDS).logits
    torch.testing.assert_close(back, expected, rtol=0, atol=1e-5)

    out = tmp_path / "small"
    report = run(deepseek, out, to="cp", rank=1, calibrate=str(corpus_folder), context=16, finetune=1)
    assert report["bpb"]["finetuned"] != report["bpb"]["after"] != report["bpb"]["before"]
    assert report["parameters"]["added"]["after"] < report["parameters"]["added"]["before"]
    assert all(site["deviation"]["block"] is None for site in report["sites"])
    small = load_hf(out)
    assert sum(parameter.numel() for parameter in small.parameters()) == report["parameters"]["total"]["after"]
    # Every command that reads Hugging Face folders reads this one, and so does compress.
    sizes = ["--batches", "2", "--rows", "2", "--context", "16", "--json"]
    assert main(["eval", "bpb", "--model", str(out), "--corpus", str(corpus_folder), *sizes]) == 0
    assert json.loads(capsys.readouterr().out)["bpb"] == pytest.approx(report["bpb"]["finetuned"], abs=1e-9)
    assert run(out, tmp_path / "again", rank=(1, 2))["parameters"]["added"]["before"] == sum(
        temper.count_parameters(module.config)
        for module in small.modules()
        if isinstance(module, temper.HyperConnection)
    )
    # Saved and loaded, in memory and from the folder: the same bits.
    with torch.no_grad():
        logits = small(IDS).logits
        save(small, tmp_path / "copy")
        assert torch.equal(load_hf(tmp_path / "copy")(IDS).logits, logits)
    # transformers by itself has no way to read these weights as DeepSeek's own.
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        AutoModelForCausalLM.from_pretrained(out)
    with pytest.raises(ValueError, match="has no sites of `to_temper`"):
        save(theirs, tmp_path / "nothing")
    with pytest.raises(ValueError, match="is not empty"):
        save(small, out)
    (tmp_path / "copy" / "temper.json").write_text('{"format": "other"}')
    with pytest.raises(ValueError, match="expected 'temper-deepseek-1'"):
        load_hf(tmp_path / "copy")
