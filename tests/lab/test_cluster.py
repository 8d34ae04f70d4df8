"""Plans for a cluster: by hand, against the published figure, and against steps measured on this CPU."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from temper_lab import recipe as recipes
from temper_lab.cli import main
from temper_lab.model import GPT
from temper_lab.optim import Muon, Optimizers, muon, orthogonalize
from temper_lab.recipe import Recipe
from temper_lab.train import cluster
from temper_lab.train.cluster import DEVICES, Cluster, plan
from temper_lab.train.plan import CPU_SHARE

PAGE = Path(__file__).parents[2] / "docs" / "scale.md"
H100 = DEVICES["H100"]


def small(**changes: object) -> Recipe:
    """Depth 4, width 256, N = 4, 8 rows of 256 tokens in a step, 2 of them in a micro-batch."""
    model = {"depth": 4, "width": 256, "context": 256, "preset": "mhc", "num_streams": 4}
    train = {"batch_tokens": 2048, "device_batch_size": 2}
    fields = {f"model.{key}": value for key, value in model.items()}
    fields |= {f"train.{key}": value for key, value in train.items()} | {"data.num_shards": 0}
    return recipes.load("cpu-small").with_fields(fields | changes)


def test_the_page_has_the_numbers_of_the_code():
    text = PAGE.read_text(encoding="utf-8")
    assert cluster.table() in text
    assert f"{cluster.published_estimate():.1%}" in text
    assert f"{cluster.published_estimate(recompute=False):.1%}" in text


def test_the_published_overhead():
    assert cluster.published_estimate() == pytest.approx(cluster.PUBLISHED_OVERHEAD, abs=0.01)


def test_copies_exchange_gradients_and_shards_exchange_weights_as_well():
    weights = 4 * plan(small(), Cluster(H100, gpus_per_node=1)).parameters
    copied = plan(small(), Cluster(H100, gpus_per_node=4))
    assert copied.memory["weights"] == weights
    assert copied.sent["exchange"] == pytest.approx(2 * weights * 3 / 4)
    assert copied.seconds["exchange"] == pytest.approx(copied.sent["exchange"] / H100.link)
    sharded = plan(small(**{"train.parallel": "fsdp"}), Cluster(H100, nodes=2, gpus_per_node=2))
    assert sharded.memory["weights"] == weights / 4
    # One micro-batch each: weights twice, gradients once, and Muon's gathering.
    assert sharded.sent["exchange"] == pytest.approx(4 * weights * 3 / 4)
    assert sharded.seconds["exchange"] == pytest.approx(sharded.sent["exchange"] / H100.network)
    # A copy in every node: shards travel within it, and half of the gradients between.
    both = plan(small(**{"train.parallel": "fsdp", "train.replicas": 2}), Cluster(H100, nodes=2, gpus_per_node=2))
    assert both.memory["weights"] == weights / 2
    assert both.seconds["exchange"] == pytest.approx(4 * weights / 2 / H100.link + weights / 2 / H100.network)


def test_a_pipeline_hands_on_all_streams():
    alone, stages = (plan(small(), Cluster(H100, gpus_per_node=4, pipeline=count)) for count in (1, 4))
    assert stages.memory["weights"] == alone.memory["weights"] / 4
    assert stages.sent["pipeline"] == 2 * 2048 * 4 * 256 * 4
    assert cluster.added(stages)["pipeline"] == 4
    assert stages.bubble == pytest.approx(3 / 7)
    assert stages.step > alone.step
    with pytest.raises(ValueError, match="pipeline is 8; expected a divisor of the 4 blocks"):
        plan(small(), Cluster(H100, pipeline=8))
    with pytest.raises(ValueError, match="pipeline is 3; expected a divisor of the 8 GPUs"):
        Cluster(H100, pipeline=3)


def test_streams_add_their_traffic():
    given, where = small(), Cluster(H100, gpus_per_node=1)
    plain = plan(cluster.without_streams(given), where)
    more = plan(given, where)
    assert plain.seconds["sites"] == 0
    assert more.seconds["matmuls"] == plain.seconds["matmuls"]
    assert more.seconds["sites"] >= 8 * 8 * 4 * 256 * 4 * 2048 / H100.bandwidth
    again = plan(small(**{"model.recompute": True}), where)
    assert again.seconds["sites"] > more.seconds["sites"]
    assert cluster.added(more)["time"] == pytest.approx(more.step / plain.step - 1)
    assert cluster.added(plain) == {"time": 0, "memory": 0, "parameters": 0, "pipeline": 1}


def seconds_of(action: Callable[[], object], times: int = 5) -> float:
    """The median of a few measurements on one thread, in processor time: others may keep the machine busy."""
    found = []
    for _ in range(times + 1):
        start = time.process_time()
        action()
        found.append(time.process_time() - start)
    return statistics.median(found[1:])


@pytest.mark.parametrize(("preset", "num_streams"), [("residual", 1), ("mhc", 4)])
def test_a_step_on_this_cpu_takes_what_is_estimated_within_a_factor_of_1_6(preset, num_streams):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        left, right = torch.ones(1024, 1024), torch.ones(1024, 1024)
        source, target = torch.ones(1 << 24), torch.empty(1 << 24)
        flops = 2 * 1024**3 / seconds_of(lambda: left @ right)
        bandwidth = 8 * (1 << 24) / seconds_of(lambda: target.copy_(source))
        device = cluster.Device("this CPU", 1e9, bandwidth, flops, 1, 1, CPU_SHARE)
        given = small(**{"model.preset": preset, "model.num_streams": num_streams, "train.batch_tokens": 512})
        model = GPT(given.model)
        optimizers = Optimizers.build(model, given.optim, batch_tokens=512, width=256)
        ids = torch.randint(given.model.vocab_size, (2, 256))

        def step() -> None:
            model.loss(ids, ids.clone()).backward()
            optimizers.step(0, 10)

        measured = seconds_of(step)
    finally:
        torch.set_num_threads(threads)
    estimated = plan(given, Cluster(device, gpus_per_node=1)).step
    assert 1 / 1.6 < estimated / measured < 1.6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(128, 128), (128, 512), (512, 128), (32, 48)])
def test_the_flops_of_muon(shape, dtype):
    with FlopCounterMode(display=False) as counter:
        orthogonalize(torch.randn(1, *shape).to(dtype))
    assert muon.orthogonalize_flops(*shape, dtype=dtype) == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_muon_takes_a_large_model_in_several_batches(monkeypatch):
    start, grads = torch.randn(5, 16, 8), torch.randn(5, 16, 8)
    found = []
    for limit in (1 << 28, 2 * 16 * 8, 1):
        monkeypatch.setattr(muon, "MAX_BATCH", limit)
        parameters = [torch.nn.Parameter(part.clone()) for part in start]
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad.clone()
        Muon(parameters).step()
        found.append(torch.stack([parameter.detach() for parameter in parameters]))
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])


def test_the_command(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["train", "--recipe", "paper-n4", "--dry-run", "--nodes", "2", "--data.num-shards", "16"]
    assert main([*words, "--gpu", "h100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["estimate"]["cluster"] == {"gpu": "H100", "nodes": 2, "gpus_per_node": 8, "pipeline": 1}
    expected = plan(recipes.load("paper-n4").with_fields({"data.num_shards": 16}), Cluster(H100, 2))
    assert found["estimate"]["seconds"]["step"] == pytest.approx(expected.step)
    assert any("16 x H100 in 2 nodes, ddp 16 (all of this is an estimate)" in line for line in found["plan"])
    monkeypatch.setenv("WORLD_SIZE", "x")
    assert main(words[:4]) == 1
    assert "WORLD_SIZE is 'x'; expected a number of processes" in capsys.readouterr().err
    assert main([*words, "--gpu", "H10"]) == 1
    assert "H100" in capsys.readouterr().err
    assert main(["train", "--recipe", "paper-n4", "--out", "run", "--gpu", "H100"]) == 1
    assert "--gpu is for a plan" in capsys.readouterr().err
    # Without a GPU there is no cluster that these could describe.
    assert main(words) == 1
    assert "expected --gpu with them" in capsys.readouterr().err
    assert main([*words, "--gpu", "H100", "--gpus-per-node", "0"]) == 1
    assert "gpus_per_node is 0" in capsys.readouterr().err
