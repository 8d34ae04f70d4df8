"""`temper theory` on tiny models: what it reports is what the library says, and it refuses what it cannot compare."""

import copy
import json

import pytest
import torch

import temper
from temper import theory
from temper_lab import recipe
from temper_lab.cli import main
from temper_lab.data import open_corpus
from temper_lab.model import GPT, ModelConfig
from temper_lab.model.functional import rms_norm
from temper_lab.report.plots_theory import draw
from temper_lab.theory import neighbour, study, summary, with_neighbours
from temper_lab.tokenizer import Tokenizer
from temper_lab.train import model_dir
from temper_lab.train.run_dir import RunFolder

TEXT = "the people of this union have seen peace and war with courage"


@pytest.fixture(scope="module")
def tokenizer(corpus_folder):
    return Tokenizer.train(open_corpus(corpus_folder, val_fraction=0.2).texts(), 300)


def network_of(preset, tokenizer, num_streams=2, depth=1, seed=0, **router):
    torch.manual_seed(seed)
    config = ModelConfig(
        depth=depth,
        vocab_size=tokenizer.vocab_size,
        context=24,
        head_dim=32,
        preset=preset,
        num_streams=num_streams,
        router=router,
    )
    model = GPT(config)
    with torch.no_grad():
        # As after training: nothing is zero, gates are open, streams mix.
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
        for site in model.sites():
            for parameter in (site.res.bias,) if hasattr(site, "res") else ():
                parameter *= 0.2
    return model.eval()


def save(path, model, tokenizer):
    files = {"tokenizer.json": tokenizer.to_json()}
    model_dir.save_model(path, model.config.to_dict(), model.state_dict(), files)
    return str(path)


def rows(model, seed=0):
    ids = torch.randint(model.config.vocab_size, (2, 13), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


class TestNeighbours:
    def test_dense_becomes_tucker_and_others_lose_a_rank(self):
        for preset, name, rank in (
            ("mhc", "tucker", (2, 12, 2, 2)),
            ("temper-tucker", "tucker", (1, 11, 1, 1)),
            ("temper-cp", "cp", 1),
            ("temper-tt", "tt", (2, 3, 3)),
            ("hc", "tucker", (2, 12, 2, 2)),
        ):
            site = temper.HyperConnection(temper.preset(preset, num_streams=4, dim=16), layer_index=3)
            other = neighbour(site)
            assert (other.res.generator.name, other.res.generator.rank) == (name, rank)
            assert other.layer_index == 3
            before = {key: value for key, value in site.state_dict().items() if ".generator." not in key}
            assert all(torch.equal(other.state_dict()[key], value) for key, value in before.items())

    def test_a_kind_and_a_rank_can_be_asked_for(self):
        site = temper.HyperConnection(temper.preset("temper-cp", num_streams=4, dim=16, rank=3))
        assert neighbour(site, rank=2).pre.generator.rank == 2
        full = neighbour(site, "tucker", (4, 16))
        torch.testing.assert_close(full.res.generator.to_dense(), site.res.generator.to_dense())
        with pytest.raises(ValueError, match="feature mode"):
            neighbour(site, "tucker", (2, 17))

    def test_rank_one_is_nudged(self):
        site = temper.HyperConnection(temper.preset("temper-tucker-frozen", num_streams=4, dim=16, rank=1))
        other = neighbour(site)
        assert other.config == site.config
        one, two = site.res.generator.to_dense(), other.res.generator.to_dense()
        assert 1e-3 < ((one - two).norm() / one.norm()).item() < 0.2


class TestStudy:
    def test_it_is_what_the_library_says(self, tokenizer):
        model = network_of("mhc", tokenizer, depth=1)
        other = with_neighbours(model)
        ids, targets = rows(model)
        report = study(model, other, ids, targets)
        assert report["exceeded"] == []
        assert [site["site"] for site in report["sites"]] == ["block 0 attention", "block 0 mlp"]
        # The second site by hand, from the streams that the model itself has there.
        wide, wide_other = (copy.deepcopy(part).double() for part in (model, other))
        seen = {}
        for part in (wide, wide_other):
            site = part.blocks[0].mlp_site
            site.observers = (lambda site, streams, routing: seen.__setitem__(site, streams.clone()),)
        with torch.no_grad():
            logits, logits_other = wide(ids), wide_other(ids)
        block, streams = wide.blocks[0], seen[wide.blocks[0].mlp_site]
        found = theory.deviation(
            block.mlp_site, wide_other.blocks[0].mlp_site, streams, lambda x: block.mlp(rms_norm(x))
        )
        assert report["sites"][1]["deviation"]["block"]["measured_max"] == pytest.approx(found.block.measured_max)
        assert report["sites"][1]["deviation"]["block"]["bound_max"] == pytest.approx(found.block.bound_max)
        before = (streams - seen[wide_other.blocks[0].mlp_site]).norm().item()
        assert report["sites"][0]["measured"] == pytest.approx(before)
        whole = report["whole"]
        assert whole["measured"] == report["sites"][1]["measured"] > 0
        assert whole["largest_logit_change"] == pytest.approx((logits - logits_other).abs().max().item(), rel=1e-6)
        assert whole["loss"] == pytest.approx(model.loss(ids, targets).item(), rel=1e-5)
        assert whole["loss_against"] == pytest.approx(other.loss(ids, targets).item(), rel=1e-5)
        assert next(model.parameters()).dtype == torch.float32

    @pytest.mark.parametrize(
        "preset", ["temper-cp", "temper-tucker", "temper-tt", "kromhc", "mhc-lite", "hc", "mhc-identity"]
    )
    def test_every_method(self, preset, tokenizer):
        model = network_of(preset, tokenizer, num_streams=3)
        report = study(model, with_neighbours(model), *rows(model))
        assert report["exceeded"] == []
        site = report["sites"][1]
        assert site["deviation"]["block"]["measured_max"] > 0
        assert site["mixer"]["slope_max"] <= site["mixer"]["constant"] * (1 + 1e-9)
        inputs = 3 * model.config.dim
        for head in model.config.routing().heads:
            found = site["heads"][head]["compression"]
            assert found["rank"] + found["nullity"] == inputs
        if preset == "temper-tucker":
            rank = model.sites()[1].res.generator.rank
            assert site["heads"]["res"]["compression"]["rank"] == rank[0] * rank[1]
        json.dumps(report, allow_nan=False)

    def test_equal_models(self, tokenizer, tmp_path):
        model = network_of("mhc", tokenizer)
        for site in model.sites():
            torch.nn.init.zeros_(site.res.generator.weight)
        report = study(model, model, *rows(model))
        assert report["exceeded"] == []
        assert report["whole"]["measured"] == 0
        assert "loose" not in summary(report)[0]
        # Nothing above zero cannot be drawn by powers of ten.
        draw({"model": "m", "against": "m", **report, "sites": report["sites"] * 8}, tmp_path / "equal.svg")

    def test_another_backbone_is_refused(self, tokenizer):
        model, other = network_of("mhc", tokenizer), network_of("mhc", tokenizer, seed=1)
        with pytest.raises(ValueError, match=r"differ in embedding.weight; expected the same backbone"):
            study(model, other, *rows(model))
        with pytest.raises(ValueError, match="different layers"):
            study(model, network_of("mhc", tokenizer, depth=2), *rows(model))
        with pytest.raises(ValueError, match="routes nothing"):
            study(model, network_of("residual", tokenizer), *rows(model))


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    """A model as a run leaves it."""
    path = tmp_path_factory.mktemp("models") / "run"
    save(path / "model", network_of("mhc", tokenizer), tokenizer)
    return str(path / "model")


class TestCommand:
    def test_table_json_and_figure(self, folder, tmp_path, corpus_folder, capsys):
        files = [tmp_path / "new" / "theory.json", tmp_path / "theory.svg"]
        options = ["--corpus", str(corpus_folder), "--tokens", "48", "--json", str(files[0]), "--plot", str(files[1])]
        assert main(["theory", "--model", folder, *options]) == 0
        out = capsys.readouterr().out
        assert "block 0 attention" in out
        assert "proved 0.5000" in out
        assert "loose\n" in out
        report = json.loads(files[0].read_text())
        assert report["tokens"] == 48
        assert report["text"] == f"validation text of {corpus_folder}"
        assert report["sites"][0]["heads"]["res"]["against"].startswith("tucker 2x")
        assert files[1].stat().st_size > 10_000
        assert sorted(path.name for path in tmp_path.rglob("*")) == ["new", "theory.json", "theory.svg"]

    def test_against_another_model_and_on_a_text(self, folder, tokenizer, tmp_path, capsys):
        from temper_lab.train.model_dir import load

        # The same backbone, and other routing.
        model = load(folder)[0]
        with torch.no_grad():
            for site in model.sites():
                site.res.bias += 0.1 * torch.eye(2)
        other = save(tmp_path / "other", model, tokenizer)
        file = tmp_path / "theory.json"
        assert main(["theory", "--model", folder, "--against", other, "--text", TEXT, "--json", str(file)]) == 0
        report = json.loads(file.read_text())
        assert report["against"] == other
        assert report["text"] == "the given text"
        assert report["sites"][1]["deviation"]["logits"]["res"]["measured_max"] == 0
        assert report["sites"][1]["deviation"]["routing"]["res"]["measured_max"] > 1e-3

    def test_the_text_of_the_run(self, tokenizer, tmp_path, corpus_folder, capsys):
        run, file = tmp_path / "run", tmp_path / "theory.json"
        save(run / "model", network_of("temper-cp", tokenizer), tokenizer)
        here, moved = str(corpus_folder), str(tmp_path / "moved")
        for model, corpus, name in ((run, here, here), (run / "model", here, here), (run, moved, "sotu")):
            data = {"corpus": corpus, "val_fraction": 0.1, "max_chars": 0}
            RunFolder(run).write(recipe={**recipe.load("cpu-smoke").to_dict(), "data": data})
            assert main(["theory", "--model", str(model), "--tokens", "30", "--json", str(file)]) == 0
            assert json.loads(file.read_text())["text"] == f"validation text of {name}"

    def test_a_folder_of_transformers(self, folder, tmp_path, corpus_folder, capsys):
        pytest.importorskip("transformers")
        exported, file = tmp_path / "hf", tmp_path / "theory.json"
        assert main(["export", "--model", folder, "--out", str(exported)]) == 0
        command = ["theory", "--tokens", "24", "--corpus", str(corpus_folder), "--rank", "1", "--to", "tt"]
        numbers = []
        for model in (str(exported), folder):
            assert main([*command, "--model", model, "--json", str(file)]) == 0
            numbers.append(json.loads(file.read_text())["sites"])
        assert numbers[0] == numbers[1]

    def test_a_bound_that_does_not_hold_is_an_error(self, folder, monkeypatch, capsys):
        from temper.mixers import Mixer

        # A wrong constant must be noticed.
        monkeypatch.setattr(Mixer.named("sinkhorn"), "lipschitz", lambda self: 0.0)
        assert main(["theory", "--model", folder, "--text", TEXT]) == 1
        assert "error: bound exceeded at block 0 mlp: routing res" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--rank", "two"], "expected a number like 8, numbers like 2x12"),
            (["--rank", "3x99", "--text", TEXT], "rank 3 of the stream mode (size 2) is out of range"),
            (["--text", TEXT, "--corpus", "sotu"], "leave one out"),
            (["--against", "x", "--to", "cp"], "give one or the other"),
            (["--against", "/nowhere", "--text", TEXT], "/nowhere"),
            (["--text", ""], "expected at least two"),
            (["--tokens", "1"], "--tokens is 1"),
            (["--corpus", "/nowhere"], "no such file or folder"),
            (["--plot", "theory.doc"], "cannot write a figure"),
            (["--json", "."], "it is a folder"),
        ],
        ids=lambda value: value[0] if isinstance(value, list) else "",
    )
    def test_bad_input(self, folder, options, message, capsys):
        assert main(["theory", "--model", folder, *options]) == 1
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1

    def test_nothing_to_look_at(self, tokenizer, tmp_path, capsys):
        path = save(tmp_path / "plain", network_of("residual", tokenizer), tokenizer)
        assert main(["theory", "--model", path, "--text", TEXT]) == 1
        assert "the residual model routes nothing" in capsys.readouterr().err
        assert main(["theory", "--model", str(tmp_path / "nowhere")]) == 1
        assert "nowhere" in capsys.readouterr().err
