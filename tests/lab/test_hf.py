"""Our models in transformers: the same logits, the same text, whatever transformers does around them."""

import itertools
import json
import shutil
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from older import with_scalar_gates

import temper
from temper_lab.cli import main
from temper_lab.engine import generate
from temper_lab.interop.export import Score, export, score_of
from temper_lab.interop.nanochat import from_nanochat
from temper_lab.model import GPT, ModelConfig
from temper_lab.tokenizer import Tokenizer
from temper_lab.train import model_dir
from temper_lab.train.model_dir import load

transformers = pytest.importorskip("transformers")
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from temper_lab.interop.hf import TemperConfig, TemperForCausalLM, fast_tokenizer  # noqa: E402
from temper_lab.interop.hf.modeling import Past  # noqa: E402

transformers.utils.logging.disable_progress_bar()

VOCAB, CONTEXT = 61, 24
TEXTS = ["", "the people", "  of  this\tunion\r\n\r\nhave", "a <|bos|> b", "peace 1850, war 7", "año 北京 🙂", "\x00\n"]


def shaken(preset: str = "temper-cp", vocab_size: int = VOCAB, context: int = CONTEXT, **changes) -> GPT:
    torch.manual_seed(0)
    config = ModelConfig(2, vocab_size, context, head_dim=32, preset=preset, num_streams=4, **changes)
    model = GPT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def ids_of(rows: int = 3, tokens: int = 20) -> torch.Tensor:
    return torch.randint(VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def model() -> TemperForCausalLM:
    return TemperForCausalLM.from_gpt(shaken())


@pytest.fixture(scope="module")
def folder(tmp_path_factory, corpus_folder):
    """A model folder of the lab, whose model sometimes ends a text."""
    tokenizer = Tokenizer.train((path.read_text() for path in sorted(corpus_folder.iterdir())), 300)
    network = shaken(vocab_size=tokenizer.vocab_size, context=48)
    with torch.no_grad():
        network.head.weight[tokenizer.bos] *= 1.5
    path = tmp_path_factory.mktemp("lab") / "model"
    files = {"tokenizer.json": tokenizer.to_json()}
    return model_dir.save_model(path, network.config.to_dict(), network.state_dict(), files)


@pytest.fixture(scope="module")
def exported(folder):
    out = folder.parent / "exported" / "hf"
    assert main(["export", "--model", str(folder), "--to", "hf", "--out", str(out)]) == 0
    return out


@pytest.mark.parametrize("preset", sorted(temper.PRESETS))
@torch.no_grad()
def test_every_preset_comes_back_with_the_same_logits(preset, tmp_path):
    # Not the width that follows from the depth.
    ours = shaken(preset, width=96)
    TemperForCausalLM.from_gpt(ours).save_pretrained(tmp_path)
    # Memory that nobody wrote is NaN here: rotary tables and permutations are in no file.
    torch.use_deterministic_algorithms(True)
    try:
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    finally:
        torch.use_deterministic_algorithms(False)
    assert isinstance(theirs, TemperForCausalLM)
    assert theirs.config.model_config() == ours.config
    assert (theirs.config.hidden_size, theirs.config.num_attention_heads) == (96, 3)
    for tensors in (GPT.named_parameters, GPT.named_buffers):
        for (name, value), (_, expected) in zip(tensors(theirs.model), tensors(ours), strict=True):
            assert torch.equal(value, expected), name
    expected = ours(ids_of())
    assert expected.std() > 0.5
    assert torch.equal(theirs(ids_of()).logits, expected)
    # With a cache and a mask that hides nothing, by another path through attention.
    cached = theirs(ids_of(), attention_mask=torch.ones(3, 20), use_cache=True).logits
    torch.testing.assert_close(cached, expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_keys_and_configuration_are_public(model, tmp_path):
    assert list(model.state_dict()) == [f"model.{key}" for key in model.model.state_dict()]
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "temper"
    # Complete, so that it means the same when a default changes.
    assert model.model.config.to_dict().items() <= config.items()
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (128, 2, 4)
    assert (config.max_position_embeddings, config.intermediate_size, config.num_key_value_heads) == (CONTEXT, 512, 4)
    with pytest.raises(ValueError, match="Did you mean 'temper-cp'"):
        TemperConfig(preset="temper-pc")


def test_a_new_model_starts_as_ours_does():
    config = ModelConfig(2, VOCAB, CONTEXT, head_dim=32, preset="temper-tucker-frozen", num_streams=4)
    torch.manual_seed(3)
    ours = GPT(config)
    torch.manual_seed(3)
    theirs = AutoModelForCausalLM.from_config(TemperConfig.of(config))
    assert all(torch.equal(value, theirs.model.state_dict()[key]) for key, value in ours.state_dict().items())
    assert torch.equal(ours(ids_of()), theirs(ids_of()).logits)


def test_what_a_checkpoint_lacks_starts_as_ours_does(model, tmp_path):
    gone = "model.blocks.0.mlp_site.res.bias"
    state = {key: value for key, value in model.state_dict().items() if key != gone}
    model.save_pretrained(tmp_path, state_dict=dict(state))
    back = TemperForCausalLM.from_pretrained(tmp_path)
    for key, value in back.state_dict().items():
        expected = torch.eye(4) * 8 - 8 if key == gone else state[key]
        assert torch.equal(value, expected), key


@torch.no_grad()
def test_half_precision_keeps_the_routing_whole(tmp_path):
    ours = shaken("mhc-lite")
    TemperForCausalLM.from_gpt(ours).save_pretrained(tmp_path)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    dtypes = {name: parameter.dtype for name, parameter in half.named_parameters()}
    assert all((dtype == torch.float32) == ("_site." in name) for name, dtype in dtypes.items())
    # Eight bits of mantissa through two blocks; a wrong table would be off by whole units.
    expected = ours(ids_of())
    assert 1e-4 < (half(ids_of()).logits - expected).abs().max() < 0.05 * expected.abs().max()


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_changes_nothing(model, side):
    rows = [ids_of()[0, :5], ids_of()[1, :11], ids_of()[2, :8]]
    ids, mask = torch.full((3, 11), 7), torch.zeros(3, 11, dtype=torch.long)
    places = [slice(11 - len(row), 11) if side == "left" else slice(len(row)) for row in rows]
    for index, (row, place) in enumerate(zip(rows, places, strict=True)):
        ids[index, place], mask[index, place] = row, 1
    logits = model(ids, attention_mask=mask).logits
    assert torch.isfinite(logits).all()
    for index, (row, place) in enumerate(zip(rows, places, strict=True)):
        torch.testing.assert_close(logits[index, place], model.model(row[None])[0], rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("starts", [(0, 0, 0), (0, 3, 7)], ids=["whole", "padded"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_cache_of_transformers_in_portions(model, kind, starts):
    past = transformers.DynamicCache(config=model.config)
    if kind == "static":
        past = transformers.StaticCache(config=model.config, max_cache_len=22)
    ids, mask = ids_of(), torch.ones(3, 20, dtype=torch.long)
    for row, start in enumerate(starts):
        mask[row, :start] = 0
    logits = []
    for start, end in itertools.pairwise([0, 9, 14, 15, 16, 20]):
        out = model(ids[:, start:end], attention_mask=mask[:, :end] if any(starts) else None, past_key_values=past)
        assert out.past_key_values is past
        assert int(past.get_seq_length()) == end
        logits.append(out.logits)
    logits = torch.cat(logits, dim=1)
    for row, start in enumerate(starts):
        torch.testing.assert_close(logits[row, start:], model.model(ids[row : row + 1, start:])[0], rtol=0, atol=1e-5)


def test_text_is_that_of_temper_sample(folder, exported, capsys):
    network, tokenizer = load(folder)
    theirs, their_tokenizer = AutoModelForCausalLM.from_pretrained(exported), AutoTokenizer.from_pretrained(exported)
    prompts = ["the people", "", "peace and war with", "congress made laws for all states, 12"]
    batch = their_tokenizer(prompts, return_tensors="pt", padding=True)
    assert batch["attention_mask"].sum(1).unique().numel() > 2
    rows = theirs.generate(**batch, max_new_tokens=16, do_sample=False)
    width = batch["input_ids"].shape[1]
    ours = generate(
        network,
        [tokenizer.encode(prompt, bos=True) for prompt in prompts],
        max_new_tokens=16,
        temperature=0,
        stop=tokenizer.bos,
    )
    # Some end by themselves and some do not, so that both are compared.
    assert 1 <= sum(len(row) == 16 for row in ours) < len(ours)
    for prompt, row, expected in zip(prompts, rows, ours, strict=True):
        new = [*row[width:].tolist(), tokenizer.bos]
        assert new[: new.index(tokenizer.bos)] == expected
        words = ["sample", "--model", str(folder), "--prompt", prompt, "--max-tokens", "16", "--temperature", "0"]
        capsys.readouterr()
        assert main(words) == 0
        assert their_tokenizer.decode(row, skip_special_tokens=True) + "\n" == capsys.readouterr().out


@pytest.mark.parametrize(
    "settings",
    [
        {"do_sample": False},
        {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "top_k": 8, "temperature": 0.7, "num_return_sequences": 2},
        {"do_sample": False, "cache_implementation": "static"},
        {"do_sample": False, "prompt_lookup_num_tokens": 2, "row": 0, "eos_token_id": VOCAB},
    ],
    ids=["greedy", "beams", "sampling", "static", "prompt-lookup"],
)
def test_generating_with_a_cache_is_generating_without(model, settings):
    settings = dict(settings)
    ids, mask = ids_of(2, 8), torch.ones(2, 8, dtype=torch.long)
    mask[1, :3] = 0
    if "row" in settings:
        row = settings.pop("row")
        ids, mask = ids[row : row + 1], mask[row : row + 1]

    def text(**options):
        torch.manual_seed(0)
        return model.generate(ids, attention_mask=mask, max_new_tokens=10, pad_token_id=0, **options)

    plain = {
        key: value for key, value in settings.items() if key not in ("cache_implementation", "prompt_lookup_num_tokens")
    }
    cached, whole = text(**settings), text(**plain, use_cache=False)
    assert torch.equal(cached, whole)
    assert cached.shape == (len(ids) * settings.get("num_return_sequences", 1), 18)


def test_beams_are_the_best_of_all(model):
    # Every continuation of two tokens, scored by our model: as many beams as tokens find the best one.
    ids = ids_of(1, 6)
    out = model.generate(ids, max_new_tokens=2, num_beams=VOCAB, do_sample=False, pad_token_id=0)
    first = model.model(ids)[0, -1].log_softmax(-1)
    longer = torch.cat((ids.expand(VOCAB, -1), torch.arange(VOCAB)[:, None]), dim=1)
    score = first[:, None] + model.model(longer)[:, -1].log_softmax(-1)
    assert out[0, -2:].tolist() == [score.argmax().item() // VOCAB, score.argmax().item() % VOCAB]


def test_the_loss_is_that_of_the_next_token(model):
    ids = ids_of()
    torch.testing.assert_close(model(ids, labels=ids).loss, model.model.loss(ids[:, :-1], ids[:, 1:]))
    labels = ids.clone()
    labels[:, :6] = labels[1] = -100
    every = F.cross_entropy(model.model(ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    torch.testing.assert_close(model(ids, labels=labels).loss, every / (labels[:, 1:] >= 0).sum())
    torch.testing.assert_close(model(ids, labels=labels, num_items_in_batch=torch.tensor(50)).loss, every / 50)
    loss, logits = model(ids, labels=labels, return_dict=False, use_cache=False)
    assert loss.shape == ()
    assert logits.shape == (3, 20, VOCAB)


def test_gradient_checkpointing_gives_the_same_gradients():
    model = TemperForCausalLM.from_gpt(shaken("temper-tucker")).train()
    ids, mask = ids_of(), torch.ones(3, 20, dtype=torch.long)
    mask[1, :6] = 0
    runs = []
    model.model.blocks[1].mlp.register_forward_hook(lambda *_: runs.append(1))

    def gradients(**inputs):
        model.zero_grad()
        runs.clear()
        model(ids, labels=ids, **inputs).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()], len(runs)

    for inputs in ({}, {"attention_mask": mask}, {"attention_mask": mask, "use_cache": True}):
        plain, once = gradients(**inputs)
        model.gradient_checkpointing_enable()
        assert model.is_gradient_checkpointing
        checkpointed, twice = gradients(**inputs)
        model.gradient_checkpointing_disable()
        assert (once, twice) == (1, 2)
        assert all(torch.equal(*pair) for pair in zip(plain, checkpointed, strict=True))


@torch.no_grad()
def test_only_the_logits_that_are_asked_for(model):
    logits = model(ids_of()).logits
    torch.testing.assert_close(model(ids_of(), logits_to_keep=2).logits, logits[:, -2:])
    torch.testing.assert_close(model(ids_of(), logits_to_keep=torch.tensor([4, 0])).logits, logits[:, [4, 0]])


def test_caches_are_made_where_they_are_wanted(model):
    assert model(ids_of()).past_key_values.get_seq_length() == 20
    assert model(ids_of(), use_cache=False).past_key_values is None
    try:
        assert model.train()(ids_of()).past_key_values is None
    finally:
        model.eval()


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"input_ids": None, "inputs_embeds": torch.zeros(1, 2, 128)}, "inputs_embeds have no place"),
        ({"output_hidden_states": True}, "output_hidden_states is not supported: .* 4 streams"),
        ({"output_attentions": True}, "output_attentions is not supported"),
        ({"attention_mask": torch.ones(3, 7)}, "attention_mask has 7 columns; expected 20"),
        ({"attention_mask": torch.ones(3, 20, 20)}, r"attention_mask has shape \(3, 20, 20\)"),
        ({"input_ids": ids_of(1, CONTEXT + 1)}, "25 tokens"),
    ],
)
def test_what_is_refused(model, inputs, message):
    with pytest.raises(ValueError, match=message):
        model(**{"input_ids": ids_of(), **inputs})


def test_the_context_ends_generation_with_a_message(model):
    with pytest.raises(ValueError, match=r"position 24; this model knows 24.*lower max_new_tokens"):
        model.generate(ids_of(1, 20), max_new_tokens=9, do_sample=False, pad_token_id=0)


def test_padding_takes_no_place_in_the_context(model):
    ids, mask = ids_of(1, 20), torch.ones(1, 20, dtype=torch.long)
    mask[:, :10] = 0
    settings = {"max_new_tokens": 14, "do_sample": False, "pad_token_id": 0}
    padded, plain = model.generate(ids, attention_mask=mask, **settings), model.generate(ids[:, 10:], **settings)
    assert torch.equal(padded[:, 10:], plain)
    assert plain.shape[1] == CONTEXT
    # Without generate's own positions, too.
    past = transformers.DynamicCache(config=model.config)
    model(ids, attention_mask=mask, past_key_values=past)
    mask = F.pad(mask, (0, 8), value=1)
    logits = model(plain[:, 10:18], attention_mask=mask, past_key_values=past).logits
    torch.testing.assert_close(logits, model.model(plain[:, :18])[:, 10:], rtol=0, atol=1e-5)


def test_every_query_sees_something():
    # Not every kernel of every torch is kind to a softmax over nothing.
    past = Past(None, torch.tensor([[0, 0, 1]]), None, context=4, device=torch.device("cpu"))
    past.begin(3)
    _, _, mask = past.append(0, torch.zeros(1, 3, 1, 2), torch.zeros(1, 3, 1, 2))
    assert mask.tolist() == [[[[True, False, False], [False, True, False], [False, False, True]]]]


def test_the_tokenizer_gives_our_ids_and_our_text(folder, exported):
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(exported)
    assert len(theirs) == ours.vocab_size
    assert theirs.bos_token_id == theirs.eos_token_id == theirs.pad_token_id == ours.bos
    assert theirs.model_max_length == 48
    assert theirs(TEXTS)["input_ids"] == ours.encode_batch(TEXTS, bos=True)
    assert theirs(TEXTS, add_special_tokens=False)["input_ids"] == ours.encode_batch(TEXTS)
    for text in TEXTS:
        assert theirs.encode(text) == ours.encode(text, bos=True)
        assert theirs.decode(theirs.encode(text), skip_special_tokens=True) == text
    assert set(theirs("people")) == {"input_ids", "attention_mask"}
    # Characters cut in two as well.
    for ids in torch.randint(ours.vocab_size, (50, 12), generator=torch.Generator().manual_seed(0)).tolist():
        assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids)


def test_the_exported_folder(exported, capsys):
    names = {path.name for path in exported.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= names
    settings = json.loads((exported / "generation_config.json").read_text())
    assert settings["bos_token_id"] == settings["eos_token_id"] == settings["pad_token_id"] == 299
    assert [path.name for path in exported.parent.iterdir()] == ["hf"]
    # A pipeline finds everything by the name of the folder.
    pipe = transformers.pipeline("text-generation", model=str(exported), device="cpu")
    assert pipe("the people", max_new_tokens=4, do_sample=False)[0]["generated_text"].startswith("the people")


def test_a_taken_folder_is_left_alone(folder, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    assert main(["export", "--model", str(folder), "--to", "hf", "--out", str(tmp_path / "out")]) == 1
    assert f"error: {tmp_path / 'out'} exists" in capsys.readouterr().err
    assert not any((tmp_path / "out").iterdir())


def test_an_export_that_fails_leaves_nothing(folder, tmp_path, monkeypatch):
    network, tokenizer = load(folder)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(transformers.PreTrainedTokenizerFast, "save_pretrained", full)
    with pytest.raises(OSError, match="No space left"):
        export(network, tokenizer, tmp_path / "out")
    assert not any(tmp_path.iterdir())
    with pytest.raises(ValueError, match="unknown target of an export 'nanochatt'"):
        export(network, tokenizer, tmp_path / "out", to="nanochatt")


def test_export_to_nanochat(folder, tmp_path, capsys):
    tokenizer = Tokenizer.load(folder)
    network = shaken("residual", vocab_size=tokenizer.vocab_size, context=48)
    files = {"tokenizer.json": tokenizer.to_json()}
    model_dir.save_model(tmp_path / "lab", network.config.to_dict(), network.state_dict(), files)
    words = ["export", "--to", "nanochat", "--out", str(tmp_path / "out")]
    assert main([*words, "--model", str(tmp_path / "lab")]) == 0
    theirs, their_tokenizer = (kind.from_pretrained(tmp_path / "out") for kind in (AutoModelForCausalLM, AutoTokenizer))
    assert type(theirs) is transformers.NanoChatForCausalLM
    batch = their_tokenizer(["the people", "peace and war"], return_tensors="pt", padding=True)
    rows = theirs.generate(**batch, max_new_tokens=8, do_sample=False)
    ours = generate(
        network, tokenizer.encode_batch(["the people", "peace and war"], bos=True), max_new_tokens=8, temperature=0
    )
    assert rows[:, batch["input_ids"].shape[1] :].tolist() == ours
    assert torch.equal(from_nanochat(tmp_path / "out")(batch["input_ids"]), network(batch["input_ids"]))
    words[-1] = str(tmp_path / "other")
    assert main([*words, "--model", str(folder)]) == 1
    assert "'temper-cp' with 4 streams; nanochat holds the residual preset only" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_a_fresh_python_loads_an_export_by_its_own_files(exported, folder, tmp_path, monkeypatch):
    # Where transformers copies the files to.
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path))
    code = f"""
import torch
from transformers import AutoModelForCausalLM, pipeline
model = AutoModelForCausalLM.from_pretrained({str(exported)!r}, trust_remote_code=True)
said = pipeline("text-generation", model={str(exported)!r}, trust_remote_code=True)("the people", max_new_tokens=3)
with torch.no_grad():
    total = float(model(torch.arange(9)[None]).logits.double().sum())
print(type(model).__name__, total, len(said[0]["generated_text"]) > 9)
model.save_pretrained({str(exported.parent / "again")!r})
"""
    with torch.no_grad():
        total = float(load(folder)[0](torch.arange(9)[None]).double().sum())
    assert python(code) == f"TemperForCausalLM {total} True\n"
    files = {"configuration_temper.py", "modeling_temper.py"}
    for path in (exported, exported.parent / "again"):
        assert files <= {file.name for file in path.iterdir()}
        # Nothing but an import, of what is installed.
        assert all("from temper_lab.interop.hf import Temper" in (path / name).read_text() for name in files)
        assert all(len((path / name).read_text().splitlines()) < 12 for name in files)


def test_a_folder_that_was_exported_before_the_move_loads(exported, folder, tmp_path):
    older = tmp_path / "older"
    shutil.copytree(exported, older)
    for name in ("configuration_temper.py", "modeling_temper.py"):
        text = (older / name).read_text()
        (older / name).write_text(text.replace("temper_lab.interop.hf", "temper_lab.hf"))
    code = f"""
from transformers import AutoModelForCausalLM
print(type(AutoModelForCausalLM.from_pretrained({str(older)!r}, trust_remote_code=True)).__name__)
"""
    assert python(code) == "TemperForCausalLM\n"


def test_the_model_card_says_what_is_known(exported, folder, tmp_path):
    card = (exported / "README.md").read_text()
    model, tokenizer = load(folder)
    total = model.num_parameters()["total"]
    for part in ("`temper-cp`, 4 residual streams", f"| parameters | {total:,} |", "bits per byte | not known |"):
        assert part in card
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "from_pretrained(folder, trust_remote_code=True)" in card
    export(model, tokenizer, tmp_path / "scored", score=Score(1.23456, 70))
    assert "1.2346 at step 70" in (tmp_path / "scored" / "README.md").read_text()
    assert score_of(folder) is None


@torch.no_grad()
def test_an_older_export_holds_gates_as_scalars(exported, tmp_path):
    older = tmp_path / "older"
    shutil.copytree(exported, older)
    with_scalar_gates(older)
    models = [AutoModelForCausalLM.from_pretrained(path) for path in (exported, older)]
    states = [model.state_dict() for model in models]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())


def test_transformers_is_imported_only_when_asked_for():
    modules = "interop.export", "interop.deepseek", "interop.hf_folder", "train.model_dir", "cli.trained"
    names = ", ".join(f"temper_lab.{name}" for name in modules)
    assert python(f"import sys, temper, {names}; print('transformers' in sys.modules)") == "False\n"


def test_without_transformers_it_says_what_to_install(folder, tmp_path):
    code = f"""
import sys
sys.modules["transformers"] = None
from temper_lab.cli import main
try:
    import temper_lab.interop.hf
except ModuleNotFoundError as error:
    print(error)
sys.stderr = sys.stdout
print(main(["export", "--model", {str(folder)!r}, "--to", "nanochat", "--out", {str(tmp_path / "out")!r}]))
"""
    said = "temper_lab.interop.hf needs transformers: pip install 'temper-hc[lab,hf]'"
    assert python(code) == f"{said}\nerror: {said}\n1\n"
    assert not (tmp_path / "out").exists()


def test_the_tokenizer_of_no_model_has_no_limit(folder):
    assert fast_tokenizer(Tokenizer.load(folder)).model_max_length > 10**9
