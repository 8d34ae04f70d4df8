"""What a run will cost, said before it starts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from temper_lab.data import open_corpus
from temper_lab.distributed import device_of, precision
from temper_lab.model import GPT, ModelConfig
from temper_lab.progress import duration, size
from temper_lab.recipe import Recipe
from temper_lab.tokenizer import Tokenizer

# The part of its matmul speed that training reaches: measured on a CPU, customary on a GPU.
CPU_SHARE, GPU_SHARE = 0.6, 0.4
# Matmuls per second of an A100 in bfloat16, for plans made on a machine without a GPU.
A100_FLOPS = 312e12


def describe(recipe: Recipe, config: ModelConfig, num_processes: int) -> list[str]:
    """Parameters, FLOPs per token, memory and tokens of a run, without allocating any of it."""
    with torch.device("meta"):
        model = GPT(config)
    counts, train = model.num_parameters(), recipe.train
    shards = num_processes if train.parallel == "fsdp" else 1
    batch = split(recipe, num_processes)
    memory = model.memory_estimate(batch.rows * config.context)
    held = sum(memory[part] for part in ("parameters", "gradients", "optimizer")) // shards
    streams = f" on {model.num_streams} streams" if model.num_streams > 1 else ""
    parts = ", ".join(f"{name} {counts[name]:,}" for name in ("blocks", "embedding", "head", "routing"))
    local = batch.num_portions // num_processes
    epochs = f"{train.steps:,} steps x {train.batch_tokens:,} = {train.steps * train.batch_tokens:,}"
    return [
        f"model        {config.preset}{streams}, depth {config.depth}, width {config.dim}, "
        f"{config.num_heads} heads, context {config.context}, vocabulary {config.vocab_size:,}",
        f"parameters   {counts['total']:,} ({parts})",
        f"FLOPs/token  {model.flops_per_token():,}",
        f"memory       about {size(held + memory['activations'])} per process (weights, gradients and optimizer "
        f"{size(held)}, activations {size(memory['activations'])})",
        f"tokens       {epochs}",
        f"batch        {num_processes} process{'es' if num_processes > 1 else ''} x {local} x {batch.rows} rows",
    ]


@dataclass(frozen=True)
class Split:
    """How the batch of a step is shared out: `shares` x `passes` x `rows` rows, over all processes."""

    shares: int
    passes: int
    rows: int

    @property
    def num_portions(self) -> int:
        """Forward passes of a step, over all processes."""
        return self.shares * self.passes


def split(recipe: Recipe, num_processes: int) -> Split:
    """The split of a recipe's batch, or a ValueError when the processes cannot share it evenly."""
    train, context = recipe.train, recipe.model.context
    shares = recipe.data.shares or num_processes
    if train.parallel == "fsdp" and num_processes == 1:
        raise ValueError("train.parallel is 'fsdp', which needs several processes: start it with torchrun")
    if shares % num_processes:
        raise ValueError(f"data.shares is {shares}; expected a multiple of the {num_processes} processes")
    if train.batch_tokens % (context * shares):
        raise ValueError(
            f"train.batch_tokens is {train.batch_tokens}; for {shares} shares expected a multiple of "
            f"{context * shares} (model.context x shares)"
        )
    share_rows = train.batch_tokens // (context * shares)
    rows = next(rows for rows in range(min(train.rows, share_rows), 0, -1) if share_rows % rows == 0)
    return Split(shares, share_rows // rows, rows)


def dry_run(recipe: Recipe) -> list[str]:
    """Everything that can be said without data, a tokenizer or memory for the model."""
    # Without torchrun, the number of processes that the recipe is made for.
    num_processes = int(os.environ.get("WORLD_SIZE", "0")) or max(1, recipe.data.shares)
    lines = describe(recipe, recipe.model, num_processes)
    with torch.device("meta"):
        total = GPT(recipe.model).flops_per_token() * recipe.train.steps * recipe.train.batch_tokens
    here = matmul_flops(recipe)
    share = GPU_SHARE if torch.cuda.is_available() else CPU_SHARE
    kind = "GPU" if torch.cuda.is_available() else "CPU"
    lines.append(
        f"ETA          {duration(total / here / share)} on this {kind} alone (estimate: {share:.0%} of its matmuls)"
    )
    if not torch.cuda.is_available():
        gpus = duration(total / (A100_FLOPS * GPU_SHARE * num_processes))
        lines.append(
            f"             {gpus} on {num_processes} A100 (estimate: {GPU_SHARE:.0%} of their bfloat16 matmuls)"
        )
    lines.append(f"corpus       {_corpus(recipe)}")
    return lines


def check_here(recipe: Recipe) -> None:
    """Raises ValueError for what the run itself would refuse: a device, a tokenizer or a corpus that is not here."""
    device_of(recipe.train.device)
    if recipe.tokenizer.path:
        Tokenizer.load(recipe.tokenizer.path)
    if not _is_to_come(recipe):
        open_corpus(recipe.data.corpus, val_fraction=recipe.data.val_fraction)


def _is_to_come(recipe: Recipe) -> bool:
    """Whether the corpus is one that can be downloaded, which a plan need not wait for."""
    return "climbmix" in recipe.data.corpus and not Path(recipe.data.corpus).exists()


def _corpus(recipe: Recipe) -> str:
    corpus = recipe.data.corpus
    if _is_to_come(recipe):
        return f"{corpus} is not there yet: temper data download --shards K --folder {corpus}"
    return str(open_corpus(corpus, val_fraction=recipe.data.val_fraction))


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
    """The least time that an action takes, after a first one that does not count."""
    best = float("inf")
    for index in range(times + 1):
        start = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if index:
            best = min(best, time.perf_counter() - start)
    return best


def measured(portion: Callable[[], object], recipe: Recipe, device: torch.device, portions: int, steps: int) -> str:
    """The ETA from two timed forward and backward passes of one process."""
    seconds = _seconds(portion, device, times=2)
    rate = recipe.train.batch_tokens / (seconds * portions)
    return (
        f"ETA          {duration(seconds * portions * steps)} (measured: {rate:,.0f} tokens/s, {steps:,} steps to go)"
    )
