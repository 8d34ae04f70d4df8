"""Estimates of a run on a cluster: memory of a GPU, communication and time of a step, and what N streams add.

It is a roofline model: matmuls run at a usual share of their peak, sites move their bytes at the bandwidth of the data
sheet, and communication is hidden behind both as far as it fits. Nothing here was measured on a GPU.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from temper.registry import check_int, unknown
from temper_lab.console import duration, size
from temper_lab.io import brief
from temper_lab.model import GPT, ModelConfig
from temper_lab.optim.muon import MAX_BATCH, orthogonalize_flops
from temper_lab.recipe import Recipe, TrainSettings, load
from temper_lab.train.plan import (
    A100_FLOPS,
    CPU_SHARE,
    GPU_SHARE,
    describe_corpus,
    matmul_flops,
    plan_batch,
)
from temper_lab.train.plan import describe as describe_run

# Weights, gradients and optimizer states are float32 in the lab; autocast computes branches in bfloat16.
FLOAT, HALF = 4, 2


class Device(NamedTuple):
    """A GPU by its data sheet, or another processor by what was measured.

    Args:
        memory: bytes.
        bandwidth: bytes a second of its own memory, reading and writing counted.
        flops: dense matmul operations a second, in bfloat16 on a GPU.
        link: bytes a second to the other GPUs of its node, in one direction.
        network: bytes a second to other nodes, in one direction.
        share: the part of `flops` that training reaches, as a rule.
    """

    name: str
    memory: float
    bandwidth: float
    flops: float
    link: float
    network: float
    share: float = GPU_SHARE


DEVICES = {
    device.name: device
    for device in (
        Device("A100", 80e9, 2.04e12, A100_FLOPS, 300e9, 25e9),
        Device("H100", 80e9, 3.35e12, 989e12, 450e9, 50e9),
        Device("H200", 141e9, 4.8e12, 989e12, 450e9, 50e9),
        Device("B200", 180e9, 8.0e12, 2250e12, 900e9, 50e9),
    )
}


def device_named(name: str) -> Device:
    """A GPU of the table, or a ValueError."""
    if name.upper() not in DEVICES:
        raise unknown("GPU", name, DEVICES)
    return DEVICES[name.upper()]


@dataclass(frozen=True)
class Cluster:
    """The GPUs of a run.

    Args:
        gpus_per_node: GPUs of a node.
        pipeline: the number of pipeline stages. The lab's trainer has one; other trainers may have more.
    """

    device: Device
    nodes: int = 1
    gpus_per_node: int = 8
    pipeline: int = 1

    def __post_init__(self) -> None:
        for name in ("nodes", "gpus_per_node", "pipeline"):
            check_int(name, getattr(self, name), 1)
        if self.num_gpus % self.pipeline:
            raise ValueError(f"pipeline is {self.pipeline}; expected a divisor of the {self.num_gpus} GPUs")

    @property
    def num_gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def ranks(self) -> int:
        """The number of data-parallel ranks."""
        return self.num_gpus // self.pipeline

    def speed(self, members: int) -> float:
        """Bytes a second between the members of a data-parallel group, which shares a node if it fits."""
        return self.device.link if members * self.pipeline <= self.gpus_per_node else self.device.network


@dataclass(frozen=True)
class Plan:
    """The estimated cost of a run.

    Args:
        memory: bytes on a GPU, by purpose.
        seconds: time of a step, by purpose; "exchange" and "pipeline" overlap with the rest.
        sent: bytes that a GPU sends in a step: "exchange" (weights and gradients) and "pipeline" (streams).
        bubble: the share of a step in which a pipeline stage is idle.
    """

    recipe: Recipe
    cluster: Cluster
    parameters: int
    memory: dict[str, float]
    seconds: dict[str, float]
    sent: dict[str, float]
    bubble: float

    @property
    def step(self) -> float:
        """Seconds of a step: computation, or communication if that takes longer."""
        busy = sum(self.seconds[part] for part in ("matmuls", "sites", "optimizer"))
        return max(busy, self.seconds["exchange"] + self.seconds["pipeline"]) / (1 - self.bubble)

    @property
    def total_memory(self) -> float:
        return sum(self.memory.values())

    @property
    def tokens_per_second(self) -> float:
        return self.recipe.train.batch_tokens / self.step

    def fits(self) -> bool:
        return self.total_memory <= self.cluster.device.memory


def plan(recipe: Recipe, cluster: Cluster) -> Plan:
    """Estimates a recipe on a cluster, or raises ValueError if its batch or its blocks cannot be divided."""
    config, train, device = recipe.model, recipe.train, cluster.device
    stages = cluster.pipeline
    if config.num_layers % stages:
        raise ValueError(f"pipeline is {stages}; expected a divisor of the {config.num_layers} blocks")
    batch = plan_batch(recipe, cluster.ranks)
    model = _on_meta(config)
    counts = model.num_parameters()
    micro_batches = batch.num_micro_batches // cluster.ranks
    tokens = batch.device_batch_size * config.context
    # Averaged over stages, though the first also has the embedding and the last the head.
    weights = FLOAT * counts["total"] / stages
    shards = cluster.ranks // train.replicas if train.parallel == "fsdp" else 1

    estimate = model.memory_estimate(tokens, autocast=True)
    block = FLOAT * (counts["blocks"] + counts["routing"]) / config.num_layers
    ends = FLOAT * (counts["embedding"] + counts["head"])
    memory = {
        "weights": weights / shards,
        "gradients": weights / shards,
        "optimizer": estimate["optimizer"] / stages / shards,
        # FSDP gathers the next block while one is in use, and keeps the embedding and the head.
        "gathered": 2 * block + ends if shards > 1 else 0.0,
        # Seven buffers of Muon, in bfloat16, for the matrices that are orthogonalized together.
        "workspace": 7.0 * HALF * min(4 * config.num_layers * config.dim**2, max(MAX_BATCH, 4 * config.dim**2)),
        # The first stage has this many micro-batches in flight.
        "activations": estimate["activations"] / stages * min(stages, micro_batches),
    }

    passes = tokens * micro_batches / stages
    again = 4 / 3 if config.checkpoint_blocks else 1
    backbone = _on_meta(without_streams(recipe).model).flops_per_token()
    routing = model.flops_per_token() - backbone
    is_recomputed = config.recompute or config.checkpoint_blocks
    numbers = sum(site_numbers(site.num_streams, is_recomputed) for site in config.routings() if not site.is_residual)
    traffic = numbers * config.dim * FLOAT * passes
    exchange, exchange_seconds = _exchange(weights, micro_batches, shards, train, cluster)
    handed = 2 * config.dim * model.num_streams * FLOAT * tokens * micro_batches if stages > 1 else 0.0
    # All stages of a pipeline share a node if they fit.
    link = device.link if stages <= cluster.gpus_per_node else device.network
    return Plan(
        recipe,
        cluster,
        counts["total"],
        memory,
        seconds={
            "matmuls": again * backbone * passes / (device.flops * device.share),
            "sites": max(traffic / device.bandwidth, again * routing * passes / device.flops),
            # Large matmuls alone come closer to the peak than a whole model.
            "optimizer": _muon_flops(recipe, device) / stages / (device.flops * min(1, 2 * device.share)),
            "exchange": exchange_seconds,
            "pipeline": handed / link,
        },
        sent={"exchange": exchange, "pipeline": handed},
        bubble=(stages - 1) / (micro_batches + stages - 1),
    )


@lru_cache(4)
def _on_meta(config: ModelConfig) -> GPT:
    with torch.device("meta"):
        return GPT(config)


def site_numbers(num_streams: int, is_recomputed: bool) -> int:
    """Numbers that a site reads and writes per token and feature in a training step, beyond those of a residual add.

    A site needs at least 8 N + 5 and a residual add 5; recomputing the forward pass takes another 3 N + 2.
    """
    return 8 * num_streams + (3 * num_streams + 2 if is_recomputed else 0)


def _muon_flops(recipe: Recipe, device: Device) -> float:
    """FLOPs of Muon for all matrices of the blocks; every GPU computes all of them."""
    dim, steps = recipe.model.dim, recipe.optim.ns_steps
    dtype = torch.bfloat16 if device.name in DEVICES else torch.float32
    square, oblong = (orthogonalize_flops(dim, cols, steps=steps, dtype=dtype) for cols in (dim, 4 * dim))
    return recipe.model.num_layers * (4 * square + 2 * oblong)


def _exchange(
    weights: float, micro_batches: int, shards: int, train: TrainSettings, cluster: Cluster
) -> tuple[float, float]:
    """Bytes that a GPU sends for weights and gradients in a step, and the seconds that takes."""
    copies = cluster.ranks // shards
    # In a ring of n, all-gather and reduce-scatter send (n - 1) / n of the whole, all-reduce twice that.
    around = weights * (shards - 1) / shards
    # Every micro-batch gathers weights twice and scatters gradients; Muon gathers once per step.
    gathered = (3 * micro_batches + 1) * around
    reduced = 2 * weights / shards * (copies - 1) / copies
    if copies > 1 and shards > 1:
        # Copies are further apart than the shards of one.
        return gathered + reduced, gathered / cluster.speed(shards) + reduced / cluster.speed(cluster.ranks)
    return gathered + reduced, (gathered + reduced) / cluster.speed(cluster.ranks)


def without_streams(recipe: Recipe) -> Recipe:
    """The same backbone with one stream and residual adds."""
    model = recipe.model.with_(preset="residual", num_streams=1, router={}, routers={}, recompute=False)
    return replace(recipe, model=model)


def added(given: Plan) -> dict[str, float]:
    """Compares a plan with that of the same backbone without streams: relative time, bytes, relative parameters."""
    base = plan(without_streams(given.recipe), given.cluster)
    sent = given.sent["pipeline"] / base.sent["pipeline"] if base.sent["pipeline"] else 1.0
    return {
        "time": given.step / base.step - 1,
        "memory": given.total_memory - base.total_memory,
        "parameters": given.parameters / base.parameters - 1,
        "pipeline": sent,
    }


def time_of_streams(
    device: Device, *, flops_per_token: float, dim: int, num_sites: int, num_streams: int, recompute: bool, bytes: int
) -> float:
    """The time that sites add to a step of any model, relative to its matmuls.

    Args:
        flops_per_token: FLOPs of the model without streams, forward and backward.
        recompute: whether the backward pass recomputes the streams.
        bytes: the size of a number in the streams.
    """
    sites = num_sites * site_numbers(num_streams, recompute) * dim * bytes / device.bandwidth
    return sites / (flops_per_token / (device.flops * device.share))


def dry_run(recipe: Recipe, where: Cluster | None = None) -> tuple[list[str], Plan]:
    """Describes a run without data, a tokenizer or memory for the model; the plan has the same in numbers.

    Args:
        where: the GPUs to plan for; None for as many A100 in one node as the recipe is made for.
    """
    # Without torchrun, the number of processes is the one that the recipe is made for.
    given = os.environ.get("WORLD_SIZE", "0")
    if not (given.isdecimal() and len(given) < 10):
        raise ValueError(f"WORLD_SIZE is {brief(given)}; expected a number of processes, as torchrun sets it")
    num_processes = int(given) or max(1, recipe.data.num_shards)
    lines = describe_run(recipe, recipe.model, num_processes if where is None else where.ranks)
    if where is None:
        is_gpu = torch.cuda.is_available()
        share, kind = (GPU_SHARE, "GPU") if is_gpu else (CPU_SHARE, "CPU")
        total = _on_meta(recipe.model).flops_per_token() * recipe.train.steps * recipe.train.batch_tokens
        eta = duration(total / matmul_flops(recipe) / share)
        lines.append(f"ETA          {eta} on this {kind} alone (estimate: {share:.0%} of its matmuls)")
    else:
        # The plan has the memory of its own GPUs.
        lines = [line for line in lines if not line.startswith("memory")]
    found = plan(recipe, where or Cluster(DEVICES["A100"], gpus_per_node=num_processes))
    return [*lines, *describe(found), f"corpus       {describe_corpus(recipe)}"], found


def describe(given: Plan) -> list[str]:
    """Describes a plan in lines of text."""
    cluster, train, device = given.cluster, given.recipe.train, given.cluster.device
    memory = ", ".join(f"{name} {size(value)}" for name, value in given.memory.items() if value)
    fits = "" if given.fits() else "; it does not fit"
    parts = [f"{name} {_seconds(given.seconds[name])}" for name in ("matmuls", "sites", "optimizer")]
    beside = [
        f"{name} {_seconds(given.seconds[name])} ({size(given.sent[name])} per GPU)"
        for name in ("exchange", "pipeline")
        if given.sent[name]
    ]
    waiting = f", {given.bubble:.0%} of it idle in the pipeline" if given.bubble else ""
    lines = [
        f"cluster      {_cluster_words(cluster, train)} (all of this is an estimate)",
        f"GPU memory   {size(given.total_memory)} of {size(device.memory)}: {memory}{fits}",
        f"computation  {', '.join(parts)} per step, at {device.share:.0%} of peak FLOPs and full bandwidth",
        f"overlapped   {', '.join(beside) or 'no communication'}",
        f"step         {_seconds(given.step)}{waiting}: {given.tokens_per_second:,.0f} tokens/s, "
        f"{duration(given.step * train.steps)} for {train.steps:,} steps",
    ]
    if given.recipe.model.routing().num_streams > 1:
        more = added(given)
        pipeline = f", {more['pipeline']:.0f} x the pipeline's traffic" if cluster.pipeline > 1 else ""
        lines.append(
            f"streams      add {more['time']:.1%} time, {size(more['memory'])} memory per GPU, "
            f"{more['parameters']:.2%} parameters{pipeline}"
        )
    return lines


def as_dict(given: Plan) -> dict[str, Any]:
    """A plan as values for JSON."""
    cluster = given.cluster
    return {
        "cluster": {
            "gpu": cluster.device.name,
            "nodes": cluster.nodes,
            "gpus_per_node": cluster.gpus_per_node,
            "pipeline": cluster.pipeline,
        },
        "parameters": given.parameters,
        "memory_bytes": {**given.memory, "total": given.total_memory, "of": given.cluster.device.memory},
        "seconds": {**given.seconds, "step": given.step, "run": given.step * given.recipe.train.steps},
        "sent_bytes": given.sent,
        "bubble": given.bubble,
        "tokens_per_second": given.tokens_per_second,
        "streams_add": added(given),
    }


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.1f} ms"


def _cluster_words(cluster: Cluster, train: TrainSettings) -> str:
    gpus = f"{cluster.num_gpus} x {cluster.device.name}"
    if cluster.nodes > 1:
        gpus += f" in {cluster.nodes} nodes"
    return f"{gpus}, {spread_words(cluster, train)}"


def spread_words(cluster: Cluster, train: TrainSettings) -> str:
    """Names the parallelism of a plan, such as `hsdp 8 x 8`."""
    words: str = train.parallel
    if train.parallel == "fsdp" and train.replicas > 1:
        words = f"hsdp {train.replicas} x {cluster.ranks // train.replicas}"
    elif cluster.ranks > 1:
        words += f" {cluster.ranks}"
    return f"{words}, pipeline {cluster.pipeline}" if cluster.pipeline > 1 else words


# mHC's published overhead (arXiv 2512.24880) is 6.7% with N = 4: 30 layers of width 2560, 4.14 billion active
# parameters, rows of 4,096 tokens, streams in bfloat16 and recomputed. The GPU and its utilization are not published.
PUBLISHED_OVERHEAD = 0.067


def published_estimate(*, recompute: bool = True) -> float:
    """The estimate of mHC's overhead in the model of which it was published."""
    return time_of_streams(
        DEVICES["H100"],
        flops_per_token=6 * 4.14e9 + 12 * 2560 * 4096 * 30,
        dim=2560,
        num_sites=60,
        num_streams=4,
        recompute=recompute,
        bytes=HALF,
    )


# The models of docs/scale.md: depth, width, rows of 4,096 tokens per micro-batch, nodes of 8 H100, and parallelism.
SIZES: dict[str, tuple[int, int, int, int, tuple[dict[str, Any], ...]]] = {
    "1B": (20, 2048, 4, 1, ({"parallel": "ddp"}, {"parallel": "fsdp"})),
    "7B": (32, 4096, 2, 8, ({"parallel": "fsdp"}, {"parallel": "fsdp", "replicas": 8}, {"pipeline": 4})),
    "27B": (48, 6784, 1, 32, ({"parallel": "fsdp"}, {"parallel": "fsdp", "replicas": 32}, {"pipeline": 8})),
}


def table() -> str:
    """The Markdown table of docs/scale.md: the paper's runs and larger models, with and without streams."""
    lines = [
        "| model | GPUs | parallelism | N | GB per GPU | step | tokens/s | streams add | sent per GPU |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in ("paper-n4", "paper-n8"):
        where = Cluster(DEVICES["A100"], gpus_per_node=4)
        lines += [_row(name, plan(recipe, where)) for recipe in (without_streams(load(name)), load(name))]
    for name, (depth, width, rows, nodes, ways) in SIZES.items():
        for way in ways:
            where = Cluster(DEVICES["H100"], nodes, pipeline=way.get("pipeline", 1))
            settings = {key: value for key, value in way.items() if key != "pipeline"}
            train = TrainSettings(steps=1, batch_tokens=1 << 22, device_batch_size=rows, **settings)
            for num_streams in (1, 4):
                preset = "residual" if num_streams == 1 else "temper-tucker"
                config = ModelConfig(
                    depth=depth,
                    width=width,
                    vocab_size=32_768,
                    context=4096,
                    preset=preset,
                    num_streams=num_streams,
                    checkpoint_blocks=True,
                )
                lines.append(_row(name, plan(Recipe(config, train), where)))
    return "\n".join(lines)


def _row(name: str, given: Plan) -> str:
    cluster, num_streams = given.cluster, given.recipe.model.routing().num_streams
    gigabytes = f"{given.total_memory / 1e9:.1f}{'' if given.fits() else ' (too much)'}"
    more = added(given)
    adds = f"{more['time']:.1%}, {more['memory'] / 1e9:.1f} GB" if num_streams > 1 else ""
    cells = [
        name,
        f"{cluster.num_gpus} x {cluster.device.name}",
        spread_words(cluster, given.recipe.train),
        str(num_streams),
        gigabytes,
        _seconds(given.step),
        f"{given.tokens_per_second:,.0f}",
        adds,
        size(sum(given.sent.values())),
    ]
    return f"| {' | '.join(cells)} |"
