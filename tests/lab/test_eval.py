"""Bits per byte."""

import json
import math

import pytest
import torch

from temper_lab.cli import main
from temper_lab.data import open_corpus, validation_batches
from temper_lab.distributed import World
from temper_lab.eval import bits_per_byte
from temper_lab.model import GPT, ModelConfig
from temper_lab.tokenizer import Tokenizer
from temper_lab.train.model_dir import load


@pytest.fixture(scope="module")
def corpus(corpus_folder):
    return open_corpus(corpus_folder, val_fraction=0.2)


@pytest.fixture(scope="module")
def tokenizer(corpus):
    return Tokenizer.train(corpus.texts(), 300)


@pytest.fixture
def model(tokenizer):
    torch.manual_seed(0)
    return GPT(ModelConfig(depth=1, vocab_size=tokenizer.vocab_size, context=32, head_dim=32))


def test_a_uniform_model_needs_log2_of_the_vocabulary_per_token(model, tokenizer, corpus):
    torch.nn.init.zeros_(model.head.weight)
    batches = validation_batches(corpus, tokenizer, 4, 32, 20)
    result = bits_per_byte(model, batches, tokenizer.token_bytes)
    targets = torch.cat([targets.flatten() for _, targets in batches])
    num_bytes = int(tokenizer.token_bytes[targets].sum())
    num_tokens = int((targets != tokenizer.bos).sum())
    assert num_tokens < targets.numel()
    assert (result.num_tokens, result.num_bytes) == (num_tokens, num_bytes)
    assert result.bpb == pytest.approx(math.log2(tokenizer.vocab_size) * num_tokens / num_bytes, rel=1e-6)
    assert result.loss == pytest.approx(math.log(tokenizer.vocab_size), rel=1e-6)


def test_it_is_the_sum_of_nats_of_the_tokens_that_have_bytes(model, tokenizer, corpus):
    torch.nn.init.normal_(model.head.weight, std=0.1)
    (ids, targets), *_ = validation_batches(corpus, tokenizer, 4, 32, 1)
    targets[:, 5] = tokenizer.bos
    log_p = model(ids).detach().double().log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
    counted = targets != tokenizer.bos
    expected = -log_p[counted].sum() / math.log(2) / tokenizer.token_bytes[targets].sum()
    assert bits_per_byte(model, [(ids, targets)], tokenizer.token_bytes).bpb == pytest.approx(float(expected), rel=1e-5)


class Half(World):
    """One of two processes whose sums are collected instead of exchanged."""

    def sum(self, *values):
        return list(values)


def test_processes_share_the_batches_and_the_sums_are_the_same(model, tokenizer, corpus):
    batches = validation_batches(corpus, tokenizer, 2, 32, 5)
    whole = bits_per_byte(model, batches, tokenizer.token_bytes)
    halves = [bits_per_byte(model, batches, tokenizer.token_bytes, world=Half(rank, 2)) for rank in (0, 1)]
    assert sum(half.num_bytes for half in halves) == whole.num_bytes
    assert sum(half.num_tokens for half in halves) == whole.num_tokens
    assert sum(half.nats for half in halves) == pytest.approx(whole.nats)


def test_nothing_to_measure_on(model, tokenizer):
    with pytest.raises(ValueError, match="no batches"):
        bits_per_byte(model, [], tokenizer.token_bytes)
    bos = torch.full((1, 4), tokenizer.bos)
    with pytest.raises(ValueError, match="only special tokens"):
        bits_per_byte(model, [(bos, bos)], tokenizer.token_bytes)


def test_the_command_repeats_the_validation_of_the_run(tiny, corpus_folder, tmp_path, capsys):
    out = tmp_path / "run"
    assert (
        main(["train", "--recipe", str(tiny), "--out", str(out), "--train.steps", "3", "--train.sample-tokens", "0"])
        == 0
    )
    capsys.readouterr()
    options = ["--corpus", str(corpus_folder), "--val-fraction", "0.1", "--rows", "4", "--batches", "2", "--json"]
    assert main(["eval", "bpb", "--model", str(out), *options]) == 0
    found = json.loads(capsys.readouterr().out)
    last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    assert found["bpb"] == pytest.approx(last["val_bpb"], rel=1e-6)
    assert found["loss"] == pytest.approx(last["val_loss"], rel=1e-6)
    assert main(["eval", "bpb", "--model", str(out), "--corpus", str(corpus_folder), "--context", "64"]) == 1
    assert "reads 32 tokens at most" in capsys.readouterr().err
    # A run without a final model has its newest checkpoint.
    before = load(out)[0].state_dict()
    for path in (out / "model").iterdir():
        path.unlink()
    (out / "model").rmdir()
    assert all(torch.equal(value, before[name]) for name, value in load(out)[0].state_dict().items())
