"""The plan of a run before it starts: its corpus, the batch of a step, and estimates of FLOPs, memory and time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from temper_lab.console import duration, size
from temper_lab.data import Corpus, open_corpus
from temper_lab.distributed import device_of, precision
from temper_lab.model import GPT, ModelConfig
from temper_lab.recipe import DataSettings, Recipe
from temper_lab.tokenizer import Tokenizer


def corpus_of(data: DataSettings) -> Corpus:
    """Opens the corpus of a recipe's section [data], or raises ValueError if it is not there."""
    if command := download_command(data):
        raise ValueError(f"{data.corpus} is not there: {command}")
    return open_corpus(data.corpus, val_fraction=data.val_fraction, max_chars=data.max_chars or None)


def download_command(data: DataSettings) -> str | None:
    """The command that downloads a corpus; None if it is there, or is none that can be downloaded."""
    path = Path(data.corpus)
    if path.exists() or not ("climbmix" in data.corpus or path.name == "books"):
        return None
    return f"temper data download {'books' if path.name == 'books' else '--shards K'} --folder {path}"


@dataclass(frozen=True)
class BatchPlan:
    """The batch of a step: `num_shards` x `grad_accum_steps` x `device_batch_size` rows, over all processes."""

    num_shards: int
    grad_accum_steps: int
    device_batch_size: int

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a step, over all processes."""
        return self.num_shards * self.grad_accum_steps


def plan_batch(recipe: Recipe, num_processes: int) -> BatchPlan:
    """The batch plan of a recipe, or a ValueError when the processes cannot divide the batch evenly."""
    train, context = recipe.train, recipe.model.context
    num_shards = recipe.data.num_shards or num_processes
    if num_processes % train.replicas:
        raise ValueError(f"train.replicas is {train.replicas}; expected a divisor of the {num_processes} processes")
    if num_shards % num_processes:
        raise ValueError(f"data.num_shards is {num_shards}; expected a multiple of the {num_processes} processes")
    if train.batch_tokens % (context * num_shards):
        raise ValueError(
            f"train.batch_tokens is {train.batch_tokens}; for {num_shards} shards expected a multiple of "
            f"{context * num_shards} (model.context x shards)"
        )
    shard_rows = train.batch_tokens // (context * num_shards)
    rows = next(rows for rows in range(min(train.device_batch_size, shard_rows), 0, -1) if shard_rows % rows == 0)
    return BatchPlan(num_shards, shard_rows // rows, rows)


# The fraction of its matmul speed that training reaches: measured on a CPU, a usual value on a GPU.
CPU_SHARE, GPU_SHARE = 0.6, 0.4
# FLOPs per second of an A100 in bfloat16, for estimates on a machine without a GPU.
A100_FLOPS = 312e12


def describe(recipe: Recipe, config: ModelConfig, num_processes: int) -> list[str]:
    """Parameters, FLOPs per token, memory and tokens of a run, without allocating any of it."""
    with torch.device("meta"):
        model = GPT(config)
    counts, train = model.num_parameters(), recipe.train
    shards = num_processes // train.replicas if train.parallel == "fsdp" else 1
    batch = plan_batch(recipe, num_processes)
    memory = model.memory_estimate(batch.device_batch_size * config.context)
    held = sum(memory[part] for part in ("parameters", "gradients", "optimizer")) // shards
    streams = f" on {model.num_streams} streams" if model.num_streams > 1 else ""
    parts = ", ".join(f"{name} {counts[name]:,}" for name in ("blocks", "embedding", "head", "routing"))
    local = batch.num_micro_batches // num_processes
    epochs = f"{train.steps:,} steps x {train.batch_tokens:,} = {train.steps * train.batch_tokens:,}"
    return [
        f"model        {config.method}{streams}, depth {config.depth}, width {config.dim}, "
        f"{config.num_heads} heads, context {config.context}, vocabulary {config.vocab_size:,}",
        f"parameters   {counts['total']:,} ({parts})",
        f"FLOPs/token  {model.flops_per_token():,}",
        f"memory       about {size(held + memory['activations'])} per process (weights, gradients and optimizer "
        f"{size(held)}, activations {size(memory['activations'])})",
        f"tokens       {epochs}",
        f"batch        {num_processes} process{'es' if num_processes > 1 else ''} x {local} "
        f"micro-batch{'es' if local > 1 else ''} x {batch.device_batch_size} rows",
    ]


def check_here(recipe: Recipe) -> None:
    """Raises ValueError if the run's device, tokenizer or corpus is not available; a download may be still to come."""
    device_of(recipe.train.device)
    if recipe.tokenizer.path:
        Tokenizer.load(recipe.tokenizer.path)
    if not download_command(recipe.data):
        corpus_of(recipe.data)


def describe_corpus(recipe: Recipe) -> str:
    """Describes the corpus of a recipe, or says how to download it."""
    if command := download_command(recipe.data):
        return f"{recipe.data.corpus} is not there yet: {command}"
    return str(corpus_of(recipe.data))


def matmul_flops(recipe: Recipe) -> float:
    """Floating point operations per second of a large matmul here, in the precision of the recipe."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype, autocast = precision(recipe.train.precision, device)
    side = 8192 if device.type == "cuda" else 1024
    left, right = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(2))

    def multiply() -> None:
        with autocast():
            left @ right

    return 2 * side**3 / _seconds(multiply, device, times=4)


def _seconds(action: Callable[[], object], device: torch.device, *, times: int) -> float:
    """The least time of an action, after one warm-up."""
    best = float("inf")
    for index in range(times + 1):
        start = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if index:
            best = min(best, time.perf_counter() - start)
    return best


def measured(
    action: Callable[[], object], recipe: Recipe, device: torch.device, num_micro_batches: int, steps: int
) -> str:
    """The ETA from two timed forward and backward passes of one process."""
    seconds = _seconds(action, device, times=2)
    rate = recipe.train.batch_tokens / (seconds * num_micro_batches)
    left = duration(seconds * num_micro_batches * steps)
    return f"ETA          {left} (measured: {rate:,.0f} tokens/s, {steps:,} steps to go)"
