"""Wrapped models in other people's trainers: the numbers of one process, whatever shards or checkpoints the model."""

import copy
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from processes import start, succeed
from test_distributed import free_ports

pytest.importorskip("transformers")
import trainers
import transformers

import temper

# Compiling takes long; everything else shares two processes.
QUICK = [name for name in trainers.SCENARIOS if name != "compiled"]
ROUNDED = ("mixed", "sites apart")


def together(folder, *names):
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_ports(1)[0]}
    processes = [start(trainers.__file__, str(folder), *names, RANK=rank, **place) for rank in ("0", "1")]
    # Seconds where nobody else is at work.
    succeed(processes, seconds=1200)
    return torch.load(folder / "found.pt", weights_only=True)


@pytest.fixture(scope="module")
def alone():
    model = trainers.make()
    loss = trainers.step(model, trainers.batch(0))
    with torch.inference_mode():
        logits = model.eval()(trainers.batch(0), use_cache=False).logits
    return {"loss": loss, "gradients": trainers.gradients(model), "logits": logits}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With what one process has saved after two steps."""
    folder = tmp_path_factory.mktemp("trainers")
    model = trainers.make()
    optimizer = trainers.optimizer_of(model)
    trainers.train(model, optimizer, range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainers.save(model, optimizer, folder / "one", no_dist=True)
    return folder


@pytest.fixture(scope="module")
def found(folder):
    return together(folder, *QUICK, "resume", "meta")


def check(result, alone, *, exact=True):
    close = {"rtol": 1e-5, "atol": 1e-6} if exact else {"rtol": 0.05, "atol": 0.15}
    assert result["loss"] == pytest.approx(alone["loss"], rel=1e-6 if exact else 1e-2)
    if "logits" in result:
        torch.testing.assert_close(result["logits"], alone["logits"], **close)
    for name, value in result.get("gradients", {}).items():
        assert value is not None, name
        torch.testing.assert_close(value.float(), alone["gradients"][name], **close)
    assert "gradients" not in result or result["gradients"].keys() == alone["gradients"].keys()


@pytest.mark.parametrize("name", QUICK)
def test_two_processes_do_what_one_does(name, found, alone):
    check(found[name], alone, exact=name not in ROUNDED)


@pytest.mark.slow
def test_compiled_blocks_under_fsdp(tmp_path, alone):
    check(together(tmp_path, "compiled")["compiled"], alone)


@pytest.mark.filterwarnings("ignore")
def test_checkpoints_go_from_two_processes_to_one_and_back(found, folder):
    model = trainers.make()
    optimizer = trainers.optimizer_of(model)
    expected = trainers.train(model, optimizer, range(4))
    result = found["resume"]
    assert result["losses"] == pytest.approx(expected, rel=1e-5)
    # From one process to two.
    assert result["again"] == pytest.approx(expected[2:], rel=1e-5)
    # From two to one.
    other = trainers.make(seed=1)
    optimizer = trainers.optimizer_of(other)
    trainers.load(other, optimizer, folder / "two", no_dist=True)
    assert trainers.train(other, optimizer, range(2, 4)) == pytest.approx(expected[2:], rel=1e-5)
    for name, value in result["state"].items():
        torch.testing.assert_close(value, other.state_dict()[name], rtol=1e-4, atol=1e-5)


def test_what_was_trained_sharded_comes_back_from_its_folder(found, folder, monkeypatch):
    # Where transformers copies the file for the Auto classes to.
    monkeypatch.setenv("HF_MODULES_CACHE", str(folder / "modules"))
    model = trainers.make()
    model.load_state_dict(found["resume"]["state"])
    ids = trainers.batch(0)
    with torch.no_grad():
        expected = model.eval()(ids).logits
        assert torch.equal(temper.load_pretrained(folder / "hub")(ids).logits, expected)
    torch.save({"ids": ids, "logits": expected}, folder / "expected.pt")
    code = """
import sys, torch
from transformers import AutoConfig, AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1] + "/hub", trust_remote_code=True)
saved = torch.load(sys.argv[1] + "/expected.pt")
with torch.no_grad():
    print(torch.equal(model(saved["ids"]).logits, saved["logits"]), type(model).__name__)
config = AutoConfig.from_pretrained(sys.argv[1] + "/hub")
fresh = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
print(fresh.state_dict().keys() == model.state_dict().keys())
"""
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=False)
    assert done.stdout == "True LlamaForCausalLM\nTrue\n", done.stderr


def test_a_model_from_the_meta_device_is_never_without_values(found):
    config = trainers.make().model.layers[1].hyper_connections[0].config
    torch.manual_seed(5)
    site = temper.HyperConnection(config, layer_index=2)
    for name, value in site.state_dict().items():
        assert torch.equal(found["meta"]["reset"][name], value), name
        assert torch.isfinite(found["meta"]["first"][name]).all(), name
    assert torch.equal(found["meta"]["first"]["pre.gate"], torch.tensor([0.01]))


def test_hidden_states_are_plain_tensors():
    model, ids = trainers.make(), trainers.batch(0)
    states = model(ids, output_hidden_states=True).hidden_states
    assert [tuple(state.shape) for state in states] == [(4, 9, 16), (4, 9, 4, 16), (4, 9, 4, 16), (4, 9, 16)]
    plain = temper.unwrap(model)
    expected = plain(ids, output_hidden_states=True).hidden_states
    temper.wrap(plain, "model.layers.*", preset="residual", num_streams=4)
    states = plain(ids, output_hidden_states=True).hidden_states
    assert all(torch.equal(one, other) for one, other in zip(states, expected, strict=True))


@pytest.mark.filterwarnings("ignore")
def test_param_groups_in_the_trainer_of_transformers(tmp_path):
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate, which is not installed")
    model = trainers.make()
    rows = [{"input_ids": row, "labels": row} for row in trainers.batch(0)]
    optimizer = torch.optim.AdamW(temper.param_groups(model, lr=1e-3, weight_decay=0.1))
    arguments = transformers.TrainingArguments(
        tmp_path, max_steps=2, save_steps=2, report_to=[], use_cpu=True, weight_decay=0.1, disable_tqdm=True
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, optimizers=(optimizer, None))
    trainer.train()
    decays = {group["name"]: group["weight_decay"] for group in trainer.optimizer.param_groups}
    assert decays == {"matrix": 0.1, "embedding": 0.1, "head": 0.1, "vector": 0.0, "routing": 0.0}
    with torch.no_grad():
        again = temper.load_pretrained(tmp_path / "checkpoint-2")
        assert torch.equal(again(trainers.batch(0)).logits, model.eval()(trainers.batch(0)).logits)


def test_the_page_on_trainers_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path))
    page = Path(__file__).parents[2] / "docs" / "trainers.md"
    code = "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
    assert code.count("temper.wrap(") >= 4
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_sites_are_what_peft_can_train_beside_its_adapters():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model, ids = trainers.make().eval(), trainers.batch(0)
    expected = model(ids).logits
    adapters = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["hyper_connections"])
    model = peft.get_peft_model(model, adapters).eval()
    assert torch.equal(model(ids).logits, expected)
    model(ids, labels=ids).loss.backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert any("hyper_connections.modules_to_save" in name for name in trained)
    assert all("lora" in name or "hyper_connections" in name for name in trained)


def test_a_block_runs_with_whatever_stands_in_for_its_sites():
    """What PEFT does, without PEFT: another module in the place of `hyper_connections` that calls a copy of it."""

    class Stand(torch.nn.Module):
        def __init__(self, sites):
            super().__init__()
            self.original, self.copy = sites.requires_grad_(False), copy.deepcopy(sites).requires_grad_()

        def forward(self, *args):
            return self.copy(*args)

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.copy, name)

    model, ids = trainers.make(), trainers.batch(0)
    expected = model(ids).logits
    assert not isinstance(model.model.layers[0].hyper_connections, torch.nn.ModuleList)
    for block in model.model.layers:
        block.hyper_connections = Stand(block.hyper_connections)
    logits = model(ids).logits
    assert torch.equal(logits, expected)
    logits.sum().backward()
    for block in model.model.layers:
        assert all(parameter.grad is None for parameter in block.hyper_connections.original.parameters())
        assert all(parameter.grad is not None for parameter in block.hyper_connections.copy.parameters())
