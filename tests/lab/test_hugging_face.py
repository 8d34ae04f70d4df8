"""Other people's models and tokenizers in our evaluations."""

import json
import math
import shutil

import core_reference
import pytest
import tokenizers
import torch
import transformers
from core_bundles import write_bundle
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from temper_lab.cli import main
from temper_lab.data import open_corpus, validation_batches
from temper_lab.eval import bits_per_byte
from temper_lab.eval.core import evaluate_task, load_bundle
from temper_lab.eval.core.scoring import rows_of, score
from temper_lab.eval.hugging_face import ByteTokenizer, HFModel, HFTokenizer
from temper_lab.eval.models import LabModel, open_losses, open_model

TEXTS = ["The people of this union, peace and war.", "  courage\n\n\twhile congress", "größer 東京 🙂 ünion", "a"]


def byte_level(texts, *, prefix=False):
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"])
    backend.train_from_iterator(texts, trainer)
    return backend


def sentencepiece(texts, *, first="first", byte_fallback=True):
    """As Llama has it: spaces are a letter, one is put before the text, unknown characters are bytes."""
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=byte_fallback, unk_token="<unk>", fuse_unk=False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=first)
    backend.decoder = decoders.Sequence([decoders.Metaspace(prepend_scheme=first), decoders.ByteFallback()])
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] if byte_fallback else []
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>", "<s>", "</s>", *pieces])
    backend.train_from_iterator(texts, trainer)
    # The bytes are tokens like others, not special.
    content = json.loads(backend.to_str())
    content["added_tokens"] = content["added_tokens"][:3]
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def fast(backend, **specials):
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **specials)


def gpt2(vocab_size, positions=128):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=vocab_size, n_positions=positions, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        model.transformer.wte.weight.normal_(std=0.5)
    return model


def llama(vocab_size, positions=128, **options):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=positions,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.3,
        **options,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def corpus(corpus_folder):
    return open_corpus(corpus_folder)


@pytest.fixture(scope="module")
def gpt2_folder(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt2")
    tokenizer = fast(byte_level(corpus.texts()), bos_token="<|endoftext|>", eos_token="<|endoftext|>")
    tokenizer.save_pretrained(folder)
    gpt2(len(tokenizer)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama_folder(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    tokenizer = fast(sentencepiece(corpus.texts()), bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.save_pretrained(folder)
    llama(len(tokenizer), positions=256).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return write_bundle(tmp_path_factory.mktemp("bundle") / "core")


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_core_is_what_a_plain_implementation_finds(kind, bundle, request):
    folder = request.getfixturevalue(f"{kind}_folder")
    model = open_model(folder)
    assert isinstance(model, HFModel)
    assert model.can_share
    assert model.limit == {"gpt2": 128, "llama": 256}[kind]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    network = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()

    def encode(text):
        return [tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"]]

    def forward(ids):
        return network(ids).logits

    entries = {entry["label"]: entry for entry in core_reference.tasks(bundle)}
    for task in load_bundle(bundle).tasks:
        plain = core_reference.evaluate(bundle, entries[task.label], encode, forward, model.limit, 12)
        # With common beginnings and small batches, with large ones, and without.
        for can_share, pass_cost in ((True, 0), (True, 500), (False, 64)):
            model.can_share, model.pass_cost = can_share, pass_cost
            assert evaluate_task(model, task).correct == plain
        items = rows_of(model, task, list(range(12)))
        model.can_share = True
        shared = score(model, items)
        model.can_share = False
        for rows, scores in zip(items, shared, strict=True):
            for row, found in zip(rows, scores, strict=True):
                assert found.loss == pytest.approx(score(model, [[row]])[0][0].loss, rel=1e-5)


def test_a_memory_that_forgets_is_not_used(corpus):
    tokenizer = HFTokenizer(fast(byte_level(corpus.texts()), bos_token="<|endoftext|>"), "any")
    config = transformers.MistralConfig(
        vocab_size=tokenizer.num_ids,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        sliding_window=16,
        bos_token_id=0,
        eos_token_id=0,
    )
    assert not HFModel(transformers.MistralForCausalLM(config).eval(), tokenizer).can_share


def test_the_command_takes_both_kinds(gpt2_folder, bundle, capsys):
    assert main(["eval", "core", "--model", str(gpt2_folder), "--bundle", str(bundle), "--tasks", "squad"]) == 0
    out = capsys.readouterr().out
    assert "every prompt begins with <|endoftext|>" in out
    assert main(["eval", "bpb", "--model", str(gpt2_folder), "--corpus", "sotu", "--batches", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bpb"] > 0
    assert main(["eval", "bpb", "--model", str(gpt2_folder), "--context", "4096"]) == 1
    assert "reads 128 tokens at most" in capsys.readouterr().err


def test_which_token_begins_a_prompt(corpus):
    backend = byte_level(corpus.texts())
    end = backend.token_to_id("<|endoftext|>")
    assert HFTokenizer(fast(backend, bos_token="<|endoftext|>"), "any").bos == end
    # No BOS, and an EOS of chats: the token between documents is the one that is known.
    backend.add_special_tokens(["<|im_end|>"])
    assert HFTokenizer(fast(backend, eos_token="<|im_end|>"), "any").bos == end
    bare = tokenizers.Tokenizer(models.BPE())
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.train_from_iterator(["a b"], trainers.BpeTrainer(special_tokens=["[X]"]))
    assert HFTokenizer(fast(bare, eos_token="[X]"), "any").bos == 0
    with pytest.raises(ValueError, match=r"my-model: the tokenizer has no BOS, none of .* and no EOS"):
        HFTokenizer(fast(bare), "my-model")


def test_text_is_never_parsed_for_special_tokens(corpus):
    tokenizer = HFTokenizer(fast(byte_level(corpus.texts()), bos_token="<|endoftext|>"), "any")
    (ids,) = tokenizer.encode_batch(["a <|endoftext|> b"], bos=True)
    assert ids.count(tokenizer.bos) == 1
    assert ids[0] == tokenizer.bos


@pytest.mark.parametrize("kind", ["bytes", "bytes-prefix", "pieces", "pieces-never"])
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(kind, corpus):
    texts = list(corpus.texts())
    backend = {
        "bytes": lambda: byte_level(texts),
        "bytes-prefix": lambda: byte_level(texts, prefix=True),
        "pieces": lambda: sentencepiece(texts),
        "pieces-never": lambda: sentencepiece(texts, first="never"),
    }[kind]()
    bos = "<s>" if kind.startswith("pieces") else "<|endoftext|>"
    theirs = HFTokenizer(fast(backend, bos_token=bos), kind)
    tokenizer = ByteTokenizer(theirs)
    for text in [*TEXTS, *texts[:5]]:
        (ids,) = tokenizer.encode_batch([text])
        assert int(tokenizer.token_bytes[ids].sum()) == len(text.encode())
        # The same tokens that the model is given elsewhere.
        assert [index % tokenizer.num_ids for index in ids] == theirs.encode_batch([text])[0]
    assert tokenizer.token_bytes[tokenizer.bos] == 0
    if kind == "pieces":
        (ids,) = tokenizer.encode_batch(["the people"])
        assert ids[0] >= tokenizer.num_ids
        whole = theirs.backend.convert_ids_to_tokens(ids[0] % tokenizer.num_ids)
        assert whole.startswith("▁")
        assert tokenizer.token_bytes[ids[0]] == len(whole) - 1


def test_added_tokens_stand_for_themselves(corpus):
    backend = byte_level(corpus.texts())
    backend.add_tokens(["  \u00e4"])
    tokenizer = ByteTokenizer(HFTokenizer(fast(backend, bos_token="<|endoftext|>"), "any"))
    (ids,) = tokenizer.encode_batch(["a  \u00e4"])
    assert tokenizer.token_bytes[ids].tolist() == [1, 4]


def test_bits_per_byte_refuse_what_cannot_be_known(corpus):
    texts = list(corpus.texts())
    # Lower case is another text.
    backend = byte_level(texts)
    backend.normalizer = normalizers.Lowercase()
    tokenizer = ByteTokenizer(HFTokenizer(fast(backend, bos_token="<|endoftext|>"), "lower"))
    assert tokenizer.encode_batch(["the people"])
    with pytest.raises(ValueError, match=r"lower: the bytes of the tokens are not those of the text that begins 'The"):
        tokenizer.encode_batch(["The people"])
    # A character without a piece is lost.
    pieces = fast(sentencepiece(texts, byte_fallback=False), bos_token="<s>", unk_token="<unk>")
    with pytest.raises(ValueError, match="cannot be known"):
        ByteTokenizer(HFTokenizer(pieces, "pieces")).encode_batch(["東京"])
    words = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.train_from_iterator(texts, trainers.WordPieceTrainer(special_tokens=["[UNK]", "[CLS]"]))
    with pytest.raises(ValueError, match=r"WordPiece\) is neither byte-level nor like sentencepiece"):
        ByteTokenizer(HFTokenizer(fast(words, bos_token="[CLS]"), "bert"))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_bits_per_byte_are_the_sum_of_nats(kind, corpus, request):
    folder = request.getfixturevalue(f"{kind}_folder")
    opened = open_losses(folder)
    assert opened.limit == opened.context == {"gpt2": 128, "llama": 256}[kind]
    batches = validation_batches(corpus, opened.tokenizer, 2, 64, 3)
    found = bits_per_byte(opened.losses, batches, opened.tokenizer.token_bytes)
    network = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    size = opened.tokenizer.num_ids
    nats = num_bytes = 0
    for ids, targets in batches:
        with torch.no_grad():
            log_p = network(ids % size).logits.double().log_softmax(-1)
        losses = -log_p.gather(-1, (targets % size)[..., None]).squeeze(-1)
        bytes_BT = opened.tokenizer.token_bytes[targets]
        nats += losses[bytes_BT > 0].sum().item()
        num_bytes += int(bytes_BT.sum())
    assert found.num_bytes == num_bytes
    assert found.bpb == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-5)


def test_a_uniform_model_needs_log2_of_the_vocabulary_per_token(corpus, gpt2_folder):
    opened = open_losses(gpt2_folder)
    with torch.no_grad():
        opened.losses.network.transformer.wte.weight.zero_()
    batches = validation_batches(corpus, opened.tokenizer, 2, 64, 3)
    found = bits_per_byte(opened.losses, batches, opened.tokenizer.token_bytes)
    assert found.bpb == pytest.approx(
        math.log2(opened.tokenizer.num_ids) * found.num_tokens / found.num_bytes, rel=1e-5
    )


def test_folders_that_are_not_complete(gpt2_folder, tmp_path, capsys):
    (tmp_path / "config.json").write_text((gpt2_folder / "config.json").read_text())
    for command in ("core --bundle none", "bpb"):
        words = ["eval", *command.split(), "--model", str(tmp_path)]
        assert main(words) == 1
    assert "not a causal language model with its tokenizer, or not complete" in capsys.readouterr().err.splitlines()[-1]
    small = tmp_path / "small"
    transformers.AutoTokenizer.from_pretrained(gpt2_folder).save_pretrained(small)
    gpt2(10).save_pretrained(small)
    assert main(["eval", "bpb", "--model", str(small)]) == 1
    assert "they do not belong together" in capsys.readouterr().err


def test_a_panic_of_the_tokenizers_library_is_one_line(gpt2_folder, tmp_path, capfd):
    shutil.copytree(gpt2_folder, tmp_path / "m")
    content = json.loads((tmp_path / "m" / "tokenizer.json").read_text())
    content["model"]["continuing_subword_prefix"] = "longer than any token"
    (tmp_path / "m" / "tokenizer.json").write_text(json.dumps(content))
    assert main(["eval", "bpb", "--model", str(tmp_path / "m"), "--corpus", "sotu"]) == 1
    said = capfd.readouterr().err
    assert said.startswith("error: ")
    assert "the library tokenizers failed" in said
    assert said.count("\n") == 1


def test_ours_stay_ours(tiny, tmp_path, capsys):
    out = tmp_path / "run"
    options = ["--train.steps", "1", "--train.sample-tokens", "0"]
    assert main(["train", "--recipe", str(tiny), "--out", str(out), *options]) == 0
    for path in (out, out / "model"):
        assert isinstance(open_model(path), LabModel)
    assert open_model(out).fingerprint() == open_model(out / "model").fingerprint()


def copy_of(folder, out, *, drop=(), add=None, **changes):
    """The folder with other weights, or another configuration."""
    shutil.copytree(folder, out)
    tensors = {name: tensor for name, tensor in load_file(out / "model.safetensors").items() if name not in drop}
    save_file(tensors | (add or {}), out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | changes))
    return out


def test_weights_that_do_not_fit_are_an_error_that_names_them(llama_folder, tmp_path, capsys):
    """They used to be random numbers, other ones every time."""
    mlp = "model.layers.0.mlp.up_proj.weight"
    for index, (options, words) in enumerate(
        (
            ({"drop": (mlp,)}, f"1 missing ({mlp})"),
            ({"num_hidden_layers": 3}, "9 missing (model.layers.2."),
            ({"num_hidden_layers": 1}, "9 unexpected (model.layers.1."),
            ({"add": {"extra.weight": torch.ones(2)}}, "1 unexpected (extra.weight)"),
            ({"intermediate_size": 96}, "not complete"),
            ({"num_hidden_layers": 2**31}, "num_hidden_layers is 2147483648"),
            ({"add": {"model.norm.weight": torch.ones(32, dtype=torch.int32)}}, "model.norm.weight is of type I32"),
            ({"add": {"model.norm.weight": torch.full((32,), torch.nan)}}, "not finite (model.norm.weight)"),
        )
    ):
        folder, out = copy_of(llama_folder, tmp_path / f"bad{index}", **options), tmp_path / "out"
        for command in (["eval", "bpb"], ["upcycle", "--streams", "2", "--out", str(out)]):
            assert main([*command, "--model", str(folder)]) == 1
            assert words in capsys.readouterr().err
            assert not out.exists()


def test_no_code_of_a_folder_is_run_and_nothing_is_unpickled(llama_folder, tmp_path, capsys, monkeypatch):
    mark = tmp_path / "mark"
    code = f"open({str(mark)!r}, 'w').close()\nfrom transformers import LlamaConfig, LlamaForCausalLM as Evil\n"
    auto_map = {"AutoConfig": "evil.LlamaConfig", "AutoModelForCausalLM": "evil.Evil"}
    evil = copy_of(llama_folder, tmp_path / "evil", model_type="evil", auto_map=auto_map)
    (evil / "evil.py").write_text(code)
    pickled = shutil.copytree(llama_folder, tmp_path / "pickled")
    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    # Weights named by an index need not be safetensors, and attention can come from a repository.
    indexed = shutil.copytree(pickled, tmp_path / "indexed")
    shutil.copy(llama_folder / "model.safetensors", indexed / "other.safetensors")
    weights = dict.fromkeys(load_file(indexed / "other.safetensors"), "pytorch_model.bin")
    (indexed / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    monkeypatch.setattr("torch.load", lambda *words, **options: mark.touch())
    fetched = copy_of(llama_folder, tmp_path / "fetched", attn_implementation="somebody/kernel")
    nested = copy_of(llama_folder, tmp_path / "nested", text_config={"_attn_implementation": "flash_attention_2"})
    quantized = copy_of(llama_folder, tmp_path / "quantized", quantization_config={"quant_method": "eetq"})
    adapter = shutil.copytree(llama_folder, tmp_path / "adapter")
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "/elsewhere"}')
    monkeypatch.setattr("transformers.integrations.hub_kernels.get_kernel", lambda *words, **options: mark.touch())
    for folder in (evil, pickled, indexed, fetched, nested, quantized, adapter):
        for command in (["eval", "bpb"], ["upcycle", "--streams", "2", "--out", str(tmp_path / "out")]):
            monkeypatch.setattr("builtins.input", lambda *words: "y")
            assert main([*command, "--model", str(folder)]) == 1
            assert folder.name in capsys.readouterr().err
    assert not mark.exists()
