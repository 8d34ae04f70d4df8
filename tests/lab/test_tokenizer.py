"""The tokenizer: byte-exact both ways, deaf to special tokens in text, and clear about files that are not its own."""

import json
import os
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers, trainers

from temper_lab.tokenizer import BOS, Tokenizer

TEXTS = [
    "The budget for 1947 was 38,500 dollars; it isn't what we've asked for.\r\n\r\n",
    "Fellow citizens, the state of the union is strong. Größe, naïve, 東京タワー, 한국어, שלום עולם, مرحبا.\n",
    "def f(x):\n    return x ** 2  # <|bos|> is only text\n\n\n",
] * 5
AWKWARD = [
    "",
    " ",
    "\x00",
    "a\x00b",
    "\r\n",
    "\r\r\n\n",
    "  \t \n  x",
    "👩‍👩‍👧‍👦 👍🏽 🏳️‍🌈",
    "e\u0301 vs é; Z̸̢͑a̶l̷g̵o",
    "\u202eright to left\u202c שלום",
    "\ufeffbom \ufffe \uffff",
    "\u0378 \U0003ffff \U0010ffff",
    "\u2028\u2029\x85\x0b\x0c",
    "漢字かな交じり文 ١٢٣ ⅷ ½",
    "1 22 333 4444 55555",
    BOS,
    f"a{BOS}b {BOS}{BOS} <|bos|",
]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(TEXTS, 400)


@pytest.mark.parametrize("text", AWKWARD, ids=ascii)
def test_awkward_texts_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert tokenizer.decode(ids) == text
    assert tokenizer.bos not in ids


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(AWKWARD).map(lambda text: text * 3))
def test_any_unicode_round_trips(tokenizer, text):
    ids = tokenizer.encode(text, bos=True)
    assert ids[0] == tokenizer.bos
    assert tokenizer.bos not in ids[1:]
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert tokenizer.token_bytes[ids].sum() == len(text.encode())


def test_token_bytes_are_the_raw_lengths(tokenizer):
    assert tokenizer.token_bytes.dtype == torch.int64
    assert tokenizer.token_bytes.shape == (tokenizer.vocab_size,)
    assert tokenizer.token_bytes[tokenizer.bos] == 0
    for index in range(tokenizer.vocab_size):
        assert tokenizer.token_bytes[index] == len(tokenizer.decode_bytes([index]))
    # Not the lengths of decoded strings: half a character has one byte, and would decode to three.
    lengths = {tokenizer.decode_bytes([index]): int(tokenizer.token_bytes[index]) for index in range(400)}
    assert all(lengths[bytes([byte])] == 1 for byte in range(256))
    assert max(lengths.values()) > 3


def test_layout(tokenizer):
    assert tokenizer.vocab_size == 400
    assert tokenizer.bos == 399
    assert tokenizer.decode([tokenizer.bos]) == ""
    assert tokenizer.decode(torch.tensor(tokenizer.encode("abc", bos=True))) == "abc"
    assert tokenizer.encode_batch(["a b", ""], bos=True) == [tokenizer.encode("a b", bos=True), [399]]


def test_digits_go_in_runs_of_two(tokenizer):
    pieces = [tokenizer.decode([index]) for index in tokenizer.encode("9" * 7)]
    assert max(map(len, pieces)) <= 2
    many = Tokenizer.train(["1234567 1234567 1234567"] * 9, 300)
    assert [many.decode([index]) for index in many.encode("1234567")] == ["12", "34", "56", "7"]


def test_words_keep_their_space_and_contractions_split():
    text = "we'll don't they're HE'S under_score two  spaces\n\nend"
    tokenizer = Tokenizer.train([text] * 20, 600)
    pieces = [tokenizer.decode([index]) for index in tokenizer.encode(text)]
    assert pieces == [
        *("we", "'ll", " don", "'t", " they", "'re", " HE", "'S", " under", "_score", " two", " ", " spaces", "\n\n"),
        "end",
    ]


def test_training_is_deterministic(tokenizer):
    again = Tokenizer.train(iter(TEXTS), 400)
    assert again.fingerprint == tokenizer.fingerprint
    shuffled = random.Random(0).sample(TEXTS, len(TEXTS))
    assert Tokenizer.train(shuffled, 400).fingerprint == tokenizer.fingerprint
    assert Tokenizer.train(TEXTS, 401).fingerprint != tokenizer.fingerprint


def test_too_little_text_gives_a_smaller_vocabulary():
    tokenizer = Tokenizer.train(["ab"], 4096)
    assert tokenizer.vocab_size == 257
    assert tokenizer.bos == 256
    assert Tokenizer.train([], 257).encode("é") == Tokenizer.train(["é" * 9], 257).encode("é")


def test_bytes_per_token(tokenizer):
    texts = ["naïve 東京", "the state"]
    num_tokens = sum(len(tokenizer.encode(text)) for text in texts)
    assert tokenizer.bytes_per_token(texts) == sum(len(text.encode()) for text in texts) / num_tokens
    assert tokenizer.bytes_per_token(TEXTS) > 1.5
    with pytest.raises(ValueError, match="no text"):
        tokenizer.bytes_per_token([])


@pytest.mark.parametrize("vocab_size", [256, 0, -1, True, 300.0, 2**31, 10**400])
def test_bad_vocab_size(vocab_size):
    with pytest.raises(ValueError, match=r"vocab_size .* at least 257"):
        Tokenizer.train(TEXTS, vocab_size)


def test_bad_texts(tokenizer):
    with pytest.raises(ValueError, match="one string"):
        Tokenizer.train("abc", 300)
    with pytest.raises(ValueError, match="text 1 is a int"):
        Tokenizer.train(["a", 3], 300)
    with pytest.raises(ValueError, match="text 1 has no UTF-8 form"):
        tokenizer.encode_batch(["a", "b\ud800"])
    with pytest.raises(ValueError, match="text 0 is a NoneType"):
        tokenizer.encode(None)
    for ids in ([400], [-1, 0]):
        with pytest.raises(ValueError, match="expected 0 to 399"):
            tokenizer.decode(ids)


def test_save_and_load(tokenizer, tmp_path):
    path = tokenizer.save(tmp_path / "deep" / "folder")
    assert [file.name for file in path.parent.iterdir()] == ["tokenizer.json"]
    for place in (path, path.parent, str(path)):
        loaded = Tokenizer.load(place)
        assert loaded.fingerprint == tokenizer.fingerprint
        assert (loaded.bos, loaded.vocab_size) == (tokenizer.bos, tokenizer.vocab_size)
        assert torch.equal(loaded.token_bytes, tokenizer.token_bytes)
        # Not in the file, and easily lost on the way.
        assert loaded.bos not in loaded.encode(f"a{BOS}b")
        for text in AWKWARD:
            assert loaded.encode(text) == tokenizer.encode(text)


def test_a_failed_save_keeps_the_old_file(tokenizer, tmp_path, monkeypatch):
    path = tokenizer.save(tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    for step in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, step, full)
            with pytest.raises(OSError, match="No space"):
                Tokenizer.train(TEXTS, 300).save(tmp_path)
        assert Tokenizer.load(path).vocab_size == 400
        assert len(list(tmp_path.iterdir())) == 1


def other(pre_tokenizer, specials, model=None, normalizer=None):
    backend = Backend(model or models.BPE())
    backend.pre_tokenizer = pre_tokenizer
    if normalizer:
        backend.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet() if isinstance(pre_tokenizer, pre_tokenizers.ByteLevel) else []
    if model is None:
        backend.train_from_iterator(
            TEXTS, trainers.BpeTrainer(vocab_size=300, show_progress=False, initial_alphabet=alphabet)
        )
    backend.add_special_tokens(specials)
    return backend.to_str()


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
FOREIGN = {
    "no special": (lambda: other(BYTES, []), r"special tokens are \[\]"),
    "another special": (lambda: other(BYTES, ["<s>"]), "special tokens are"),
    "bos not last": (lambda: other(BYTES, [BOS, "<|user|>"]), "special tokens are"),
    "whitespace": (lambda: other(pre_tokenizers.Whitespace(), [BOS]), "not byte-level"),
    "prefix space": (lambda: other(pre_tokenizers.ByteLevel(add_prefix_space=True), [BOS]), "not byte-level"),
    "word level": (lambda: other(BYTES, [BOS], models.WordLevel({"a": 0}, unk_token="a")), "WordLevel, expected BPE"),
    "normalizer": (lambda: other(BYTES, [BOS], normalizer=normalizers.NFKC()), "normalizer"),
    "a list": (lambda: "[1, 2]", "no model"),
    "a checkpoint's config": (lambda: '{"model_type": "gpt2"}', "no model"),
    "hollow": (lambda: '{"model": {"type": "BPE"}, "pre_tokenizer": {"type": "ByteLevel"}}', "special tokens are"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_foreign_files(case, tmp_path):
    make, reason = FOREIGN[case]
    (tmp_path / "tokenizer.json").write_text(make(), encoding="utf-8")
    with pytest.raises(ValueError, match=rf"tokenizer.json: not a tokenizer of this lab: .*{reason}"):
        Tokenizer.load(tmp_path)


def test_missing_truncated_and_damaged_files(tokenizer, tmp_path):
    with pytest.raises(ValueError, match="no tokenizer there"):
        Tokenizer.load(tmp_path)
    path = tokenizer.save(tmp_path)
    whole = path.read_bytes()
    for length in (0, 1, len(whole) // 2, len(whole) - 2):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="is not JSON"):
            Tokenizer.load(path)
    path.write_bytes(b"\xff\xfe" + whole)
    with pytest.raises(ValueError, match="not UTF-8"):
        Tokenizer.load(path)

    def damaged(change):
        content = json.loads(whole)
        change(content)
        path.write_text(json.dumps(content), encoding="utf-8")
        with pytest.raises(ValueError, match="not a tokenizer of this lab"):
            Tokenizer.load(path)

    damaged(lambda content: content["model"]["vocab"].pop("a"))
    damaged(lambda content: content["model"]["vocab"].update({"東": content["model"]["vocab"].pop("!")}))
    damaged(lambda content: content["added_tokens"][0].update(id=5))
    damaged(lambda content: content["model"].update(merges=[["no", "where"]]))
    damaged(lambda content: content["model"].update(continuing_subword_prefix="../../x"))
