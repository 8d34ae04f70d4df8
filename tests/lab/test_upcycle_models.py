"""Whole models with more streams than they had: ours, transformers', and the folders of both."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from older import with_scalar_gates
from tokenizers import decoders, models, pre_tokenizers, trainers

import temper
from temper_lab.cli import main
from temper_lab.eval.models import open_losses
from temper_lab.interop.export import export
from temper_lab.interop.hf_folder import load_upcycled as load
from temper_lab.interop.upcycle import LAYOUTS, grow_gpt, upcycle_gpt, upcycle_hf
from temper_lab.interop.upcycle import _compare as compare
from temper_lab.model import GPT, ModelConfig
from temper_lab.model.functional import EPS
from temper_lab.tokenizer import Tokenizer
from temper_lab.train import model_dir
from temper_lab.train.model_dir import load as load_ours

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import upcycle_llama

CONFIG = ModelConfig(depth=2, vocab_size=300, context=48, head_dim=32, width=96)
ROUTED = [name for name in temper.PRESETS if name != "residual"]
IDS = torch.randint(3, 60, (2, 20), generator=torch.Generator().manual_seed(1))


def shaken(config=CONFIG):
    torch.manual_seed(0)
    model = GPT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def tiny(kind, vocab_size=64, **options):
    """A random model of transformers whose branches are as large as what they are added to."""
    torch.manual_seed(0)
    small = {"vocab_size": vocab_size, "bos_token_id": 0, "eos_token_id": 1, "initializer_range": 0.2}
    if kind == "gpt2":
        small |= {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    else:
        small |= {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        small |= {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 2}
    small |= {
        "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]},
        "mixtral": {"num_local_experts": 4},
        "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        "granite": {"residual_multiplier": 0.3},
    }.get(kind, {})
    config = transformers.AutoConfig.for_model(kind, **small | options)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module")
def tokenizer(corpus_folder):
    return Tokenizer.train((path.read_text() for path in sorted(corpus_folder.iterdir())), CONFIG.vocab_size)


@pytest.fixture(scope="module")
def plain_folder(tokenizer, tmp_path_factory):
    model = shaken(CONFIG.with_(vocab_size=tokenizer.vocab_size))
    files = {"tokenizer.json": tokenizer.to_json()}
    return model_dir.save_model(
        tmp_path_factory.mktemp("plain") / "m", model.config.to_dict(), model.state_dict(), files
    )


@pytest.fixture(scope="module")
def llama_folder(corpus_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama") / "m"
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, special_tokens=["<s>"])
    backend.train_from_iterator([path.read_text() for path in corpus_folder.iterdir()], trainer)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
    theirs.save_pretrained(folder)
    tiny("llama", vocab_size=len(theirs)).save_pretrained(folder)
    return folder


def run(*words):
    return main(["upcycle", *map(str, words)])


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "num_streams"),
    [*((name, 4) for name in ROUTED), ("temper-cp", 2), ("mhc", 3), ("temper-tucker", 8), ("kromhc", 8)],
)
def test_our_model_has_the_logits_it_had(name, num_streams):
    plain = shaken()
    model = upcycle_gpt(plain, preset=name, num_streams=num_streams)
    assert model.config == CONFIG.with_(preset=name, num_streams=num_streams)
    expected = plain(IDS)
    assert expected.abs().max() > 2
    torch.testing.assert_close(model(IDS), expected, rtol=0, atol=1e-5)
    # The old model is left alone.
    assert torch.equal(plain(IDS), expected)


def test_the_seed_decides():
    one, same, other = (upcycle_gpt(shaken(), preset="temper-cp", num_streams=2, seed=seed) for seed in (1, 1, 2))
    key = "blocks.0.mlp_site.pre.generator.factors.0"
    assert torch.equal(one.state_dict()[key], same.state_dict()[key])
    assert not torch.equal(one.state_dict()[key], other.state_dict()[key])


@torch.no_grad()
def test_what_the_sum_costs_our_model_is_what_the_mathematics_says():
    plain = shaken().double()
    model = upcycle_gpt(plain, preset="mhc", num_streams=4)
    y, found = plain.features(IDS), model.features(IDS)
    # y = x / sqrt(m + eps) tells the mean square m of x; the sum of N streams is N x, whose norm has eps / N^2.
    square = y.square().mean(-1, keepdim=True)
    m = EPS * square / (1 - square)
    torch.testing.assert_close(found, y * ((m + EPS) / (m + EPS / 16)).sqrt(), rtol=1e-9, atol=1e-9)
    assert (found - y).abs().max() > 1e-8


@torch.no_grad()
@pytest.mark.parametrize("kind", LAYOUTS)
def test_models_of_transformers_have_the_logits_they_had(kind):
    model = tiny(kind)
    expected = model(IDS).logits
    assert expected.abs().max() > 2
    upcycle_hf(model, preset="temper-tucker", num_streams=4)
    assert len([m for m in model.modules() if isinstance(m, temper.HyperConnection)]) == 2 * LAYOUTS[kind].sites
    torch.testing.assert_close(model(IDS).logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
def test_training_saving_and_generating(kind, tmp_path):
    model = tiny(kind)
    with torch.no_grad():
        before = model(IDS).logits
    upcycle_hf(model, preset="temper-tucker", num_streams=4, router={"rank": (2, 4)})
    optimizer = torch.optim.AdamW(temper.param_groups(model, lr=3e-3))
    similarities, losses = [], []
    for _ in range(21 if kind == "llama" else 2):
        with temper.observe(model) as observation:
            loss = model(IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        similarities.append([report.stream_similarity for report in observation.reports()])
    assert losses[-1] < losses[0]
    assert similarities[-1][-1] < 0.99
    assert similarities[-1] != pytest.approx(similarities[0], abs=1e-4)

    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert type(again) is type(model)
    mask = torch.ones_like(IDS)
    with torch.no_grad():
        expected = model(IDS).logits
        assert (expected - before).abs().max() > 0.01
        assert torch.equal(again(IDS).logits, expected)
    settings = {"attention_mask": mask, "max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    cached = again.generate(IDS, **settings)
    assert torch.equal(cached, again.generate(IDS, use_cache=False, **settings))
    assert torch.equal(cached, model.generate(IDS, **settings))
    half = load(tmp_path, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    assert next(m for m in half.modules() if isinstance(m, temper.HyperConnection)).pre.bias.dtype == torch.float32


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "larger", "router"),
    [("temper-tucker", 8, {}), ("temper-cp", 12, {"rank": 0.3}), ("mhc", 8, {}), ("kromhc", 8, {}), ("hc", 8, {})],
)
def test_four_streams_become_more(name, larger, router):
    model = shaken(CONFIG.with_(preset=name, num_streams=4, router=router))
    grown = grow_gpt(model, larger)
    assert (grown.num_streams, grown.config.preset) == (larger, name)
    assert [site.config for site in grown.sites()] == [grown.config.routing()] * 4
    # Copies are written 2^-10 apart, which costs some of its square: up to 12 in float64 (hc), 2 for the others.
    torch.testing.assert_close(grown(IDS), model(IDS), rtol=0, atol=40 * 2**-20)
    with temper.observe(grown) as observation:
        grown(IDS)
    assert observation.reports()[-1].stream_similarity < 0.999


def test_our_folder_lives_as_any_other(plain_folder, corpus_folder, tmp_path, capsys):
    corpus = ["--corpus", str(corpus_folder), "--batches", "1", "--json"]
    out, larger = tmp_path / "n4", tmp_path / "n8"
    out.mkdir()
    assert run("--model", plain_folder, "--streams", 4, "--preset", "temper-cp", "--out", out) == 0
    said = capsys.readouterr().out
    assert "4 streams of temper-cp" in said
    assert float(said.split("largest difference of a logit ")[1].split()[0]) <= 1e-5
    assert run("--model", out, "--streams", 8, "--preset", "temper-cp", "--out", larger) == 0
    capsys.readouterr()
    texts, numbers = [], []
    for folder in (plain_folder, out, larger):
        prompt = ["--prompt", "the people", "--temperature", "0", "--max-tokens", "8"]
        assert main(["sample", "--model", str(folder), *prompt]) == 0
        texts.append(capsys.readouterr().out)
        assert main(["eval", "bpb", "--model", str(folder), *corpus]) == 0
        numbers.append(json.loads(capsys.readouterr().out)["bpb"])
    assert len(set(texts)) == 1
    assert numbers[1:] == pytest.approx([numbers[0]] * 2, rel=1e-6)
    assert main(["export", "--model", str(out), "--out", str(tmp_path / "hf")]) == 0


def test_training_goes_on_where_the_model_was(plain_folder, corpus_folder, tmp_path, capsys):
    grown = tmp_path / "n4"
    run("--model", plain_folder, "--streams", 4, "--out", grown)
    first = {}
    for name, start in (("plain", plain_folder), ("grown", grown), ("anew", None)):
        out = tmp_path / name
        words = ["--recipe", "cpu-smoke", "--out", out, "--data.corpus", corpus_folder, "--train.threads", 1]
        words += ["--train.steps", 2, "--train.batch-tokens", 96, "--train.device-batch-size", 2]
        words += ["--train.sample-tokens", 0]
        small = ["--model.depth", 2, "--model.head-dim", 32, "--model.context", 48, "--tokenizer.path", plain_folder]
        assert main(["train", *map(str, words + (small if start is None else ["--train.start", start]))]) == 0
        first[name] = json.loads((out / "metrics.jsonl").read_text().splitlines()[0])["loss"]
    assert first["grown"] == pytest.approx(first["plain"], abs=1e-5)
    assert abs(first["anew"] - first["plain"]) > 1e-3
    assert load_ours(tmp_path / "grown")[0].num_streams == 4
    # What it started from may be gone by the time it goes on.
    assert main(["train", "--out", str(tmp_path / "grown"), "--resume"]) == 0
    capsys.readouterr()
    words = ["--recipe", "cpu-smoke", "--out", tmp_path / "other", "--data.corpus", corpus_folder]
    assert main(["train", *map(str, [*words, "--train.start", grown, "--model.num-streams", 2])]) == 1
    assert "num_streams is 4 there, 2 here" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_a_nanochat_folder_becomes_ours(plain_folder, llama_folder, tmp_path, capsys):
    model, tokenizer = load_ours(plain_folder)
    nano, out = tmp_path / "nano", tmp_path / "n3"
    export(model, tokenizer, nano, to="nanochat")
    assert run("--model", nano, "--streams", 3, "--preset", "temper-slim", "--out", out) == 0
    found, same = load_ours(out)
    assert same.fingerprint == tokenizer.fingerprint
    with torch.no_grad():
        torch.testing.assert_close(found(IDS), model(IDS), rtol=0, atol=1e-5)
    # With a tokenizer that this lab does not hold it stays what it is.
    shutil.copyfile(llama_folder / "tokenizer.json", nano / "tokenizer.json")
    assert run("--model", nano, "--streams", 2, "--preset", "mhc", "--out", tmp_path / "theirs") == 0
    assert "it stays a model of transformers: " in capsys.readouterr().out
    with torch.no_grad():
        torch.testing.assert_close(load(tmp_path / "theirs")(IDS).logits, model(IDS), rtol=0, atol=1e-5)


def test_a_folder_of_transformers(llama_folder, corpus_folder, tmp_path, capsys):
    out = tmp_path / "n4"
    assert run("--model", llama_folder, "--streams", 4, "--out", out, "--router", '{"rank": [2, 4]}') == 0
    assert "4 streams of temper-tucker" in capsys.readouterr().out
    entry = json.loads((out / "config.json").read_text())["temper"]
    assert (entry["blocks"], entry["sites"], entry["reduce"]) == ("model.layers.*", 2, "mean")
    assert entry["router"]["res"]["rank"] == [2, 4, 2, 2]
    model, plain = load(out), transformers.AutoModelForCausalLM.from_pretrained(llama_folder)
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, plain(IDS).logits, rtol=0, atol=1e-5)
    assert transformers.AutoTokenizer.from_pretrained(out)("the people") == transformers.AutoTokenizer.from_pretrained(
        llama_folder
    )("the people")
    # Evaluation sees the streams: a model without them would not notice what is done to them.
    with torch.no_grad():
        for site in model.modules():
            if isinstance(site, temper.HyperConnection):
                site.post.bias.sub_(1)
    model.save_pretrained(out)
    opened = open_losses(out)
    with torch.no_grad():
        assert torch.equal(opened.losses.network(IDS).logits, model(IDS).logits)
    with_scalar_gates(out)
    corpus = ["--corpus", str(corpus_folder), "--batches", "1", "--json"]
    assert main(["eval", "bpb", "--model", str(out), *corpus]) == 0
    assert json.loads(capsys.readouterr().out)["bpb"] > 0
    with torch.no_grad():
        assert torch.equal(load(out)(IDS).logits, model(IDS).logits)


def test_a_damaged_folder_says_what_is_wrong(llama_folder, tmp_path):
    out = tmp_path / "n2"
    assert run("--model", llama_folder, "--streams", 2, "--preset", "temper-cp", "--out", out) == 0
    with pytest.raises(ValueError, match="holds no model with streams"):
        load(llama_folder)
    config = json.loads((out / "config.json").read_text())
    shutil.copyfile(llama_folder / "model.safetensors", out / "model.safetensors")
    with pytest.raises(ValueError, match="tensors of the sites are missing"):
        load(out)
    del config["temper"]["reduce"]
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="expected blocks, sites, reduce, preset, router"):
        load(out)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model {ours} --streams 0", "streams is 0; expected 2 or more"),
        ("--model {theirs} --streams 1", "streams is 1; expected 2 or more"),
        ("--model {ours} --streams 4 --preset residual", "the preset 'residual' has one stream"),
        ("--model {theirs} --streams 4 --preset residual", "the preset 'residual' has one stream"),
        ("--model {theirs} --streams 4 --preset temper-tuker", "temper-tucker"),
        ("--model {ours} --streams 8 --preset mhc-lite", "birkhoff mixes all N! permutations"),
        ("--model {theirs} --streams 8 --preset mhc-lite", "birkhoff mixes all N! permutations"),
        ("--model {routed} --streams 8 --preset mhc", "expected --preset temper-cp and --streams 8"),
        ("--model {routed} --streams 8 --preset temper-cp:rank=1", "expected --preset temper-cp and --streams 8"),
        ("--model {ours} --streams 4 --preset temper-cp:rank=999999", "out of range"),
        ("--model {routed} --streams 6 --preset temper-cp", "4 streams become 8, 12 or another multiple"),
        ("--model {ours} --streams 4 --out {ours}", "exists and is not empty"),
        ("--model {nothing} --streams 4", "there is no model folder"),
        ("--model {odd} --streams 4", "unknown architecture 'llama'"),
        ("--model {odd} --streams 4", 'or in Python temper.wrap(model, "model.layers.*"'),
        ("--model {odd} --streams 4 --blocks model.block.*", "selects nothing"),
        ("--model {theirs} --streams 4 --sites 1", "the blocks are not what --blocks and --sites say"),
        ("--model {theirs} --streams 4 --router [1]", "is not a table"),
        ('--model {theirs} --streams 4 --router {{"rnk":2}}', "rank"),
    ],
)
def test_bad_input_leaves_nothing_behind(words, message, plain_folder, llama_folder, tmp_path, capsys, monkeypatch):
    places = {"ours": plain_folder, "theirs": llama_folder, "nothing": tmp_path / "nothing", "odd": llama_folder}
    if "{routed}" in words:
        plain, tokenizer = load_ours(plain_folder)
        model = upcycle_gpt(plain, preset="temper-cp", num_streams=4)
        files = {"tokenizer.json": tokenizer.to_json()}
        places["routed"] = model_dir.save_model(tmp_path / "routed", model.config.to_dict(), model.state_dict(), files)
    if "{odd}" in words:
        monkeypatch.delitem(LAYOUTS, "llama")
    before = sorted(tmp_path.iterdir())
    arguments = words.format(**places).split()
    if "--out" not in arguments:
        arguments += ["--out", str(tmp_path / "new")]
    try:
        code = run(*arguments)
    except SystemExit as stop:
        code = stop.code
    assert code != 0
    assert message in " ".join(capsys.readouterr().err.split())
    assert sorted(tmp_path.iterdir()) == before


def test_an_architecture_that_is_not_in_the_table(llama_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.delitem(LAYOUTS, "llama")
    words = ["--model", llama_folder, "--streams", 2, "--out", tmp_path / "n2", "--blocks", "model.layers.*"]
    assert run(*words) == 0
    with torch.no_grad():
        expected = transformers.AutoModelForCausalLM.from_pretrained(llama_folder)(IDS).logits
        torch.testing.assert_close(load(tmp_path / "n2")(IDS).logits, expected, rtol=0, atol=1e-5)


def test_logits_that_changed_are_refused():
    logits = torch.randn(2, 3, 5)
    assert compare(logits, logits + 1e-5 * logits)[0] < 1e-4
    with pytest.raises(ValueError, match=r"the logits changed by .* Nothing was written"):
        compare(logits, 1.01 * logits)
    # In half precision more of a difference is rounding, but not everything.
    assert compare(logits.bfloat16(), 1.01 * logits.bfloat16())[0] > 0
    with pytest.raises(ValueError, match="the logits changed"):
        compare(logits.bfloat16(), 2 * logits.bfloat16())


def test_the_example(capsys):
    difference, first, last = upcycle_llama.main(steps=8)
    assert difference <= 1e-5
    assert last < 0.8 * first
    assert "similarity of the streams 0." in capsys.readouterr().out


def test_models_that_have_streams_are_not_upcycled_again(llama_folder, tmp_path, capsys):
    with pytest.raises(ValueError, match="has 4 streams of mhc already; expected one stream"):
        upcycle_gpt(GPT(CONFIG.with_(preset="mhc", num_streams=4)), preset="mhc", num_streams=8)
    model = upcycle_hf(tiny("llama"), preset="mhc", num_streams=2)
    with pytest.raises(ValueError, match="has streams already"):
        upcycle_hf(model, preset="mhc", num_streams=2)
    assert run("--model", llama_folder, "--streams", 2, "--out", tmp_path / "n2") == 0
    assert run("--model", tmp_path / "n2", "--streams", 4, "--out", tmp_path / "n4") == 1
    assert "has streams already; upcycle the model that it was made from" in capsys.readouterr().err
    assert not (tmp_path / "n4").exists()
