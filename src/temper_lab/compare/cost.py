"""What a training step costs: forward, backward and optimizer of all methods, taking turns in one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from temper_lab import plan
from temper_lab.bench.measure import WARMUP, Run, interleave, milliseconds, ratios, spread
from temper_lab.bench.run import pinned
from temper_lab.compare.method import Method
from temper_lab.compare.study import Study
from temper_lab.compare.vary import has_own_step
from temper_lab.distributed import Spread, World, precision, session
from temper_lab.memory import keep_freed_memory
from temper_lab.model import GPT, ModelConfig
from temper_lab.optim import Optimizers
from temper_lab.progress import waiting
from temper_lab.recipe import Recipe

RESIDUAL = (Method("residual"), 1)
# Seconds for all of it, about, and rounds at least. If these take longer with all tokens of a step, it gets fewer.
BUDGET, ROUNDS, MOST_ROUNDS = 60.0, 5, 15
# A method costs about so much more than the residual that is timed first.
DEARER = 1.3

Group = tuple[Method, int]


def groups_of(study: Study) -> list[Group]:
    """What is measured: every method and N of runs whose step is that of the recipe."""
    cells = (cell for cell in study.cells if not study.refusal(cell) and not has_own_step(cell.vary))
    return list(dict.fromkeys((cell.method, cell.streams) for cell in cells))


def measure(study: Study, vocab_size: int, threads: int) -> dict[str, Any] | None:
    """The entry "cost" of the results; None if even one row of tokens a step would take too long."""
    asked = groups_of(study)
    if not asked:
        return None
    groups = list(dict.fromkeys([RESIDUAL, *asked]))
    recipe = study.recipe
    keep_freed_memory()
    with (
        pinned(threads or torch.get_num_threads()),
        session(recipe.train.device) as world,
        torch.random.fork_rng(devices=[]),
    ):
        torch.manual_seed(0)
        sized = _size(study, vocab_size, world, len(groups))
        if sized is None:
            return None
        rows, passes, rounds = sized
        runs = {}
        for method, streams in groups:
            config = recipe.model.with_(
                preset=method.preset, num_streams=streams, router=method.options, vocab_size=vocab_size
            )
            runs[method, streams] = Run(step_of(recipe, config, world, rows, passes))
        seconds = interleave(runs, rounds, "cost of a step")

    def row(group: Group) -> dict[str, Any]:
        ratio = spread(ratios(seconds[group], seconds[RESIDUAL]))
        return {
            "method": str(group[0]),
            "streams": group[1],
            "step_ms": _quartiles(milliseconds(seconds[group])),
            "ratio": _quartiles(ratio),
        }

    setting = {
        "times": "forward + backward + optimizer",
        "tokens": rows * passes * recipe.model.context,
        "context": recipe.model.context,
        "depth": recipe.model.depth,
        "width": recipe.model.dim,
        "vocab_size": vocab_size,
        "rounds": rounds,
        "threads": threads,
        "device": world.device.type,
    }
    return {"setting": setting, "rows": [row(group) for group in asked]}


def step_of(recipe: Recipe, config: ModelConfig, world: World, rows: int, passes: int) -> Callable[[], None]:
    """A training step on random tokens, of one process."""
    settings = recipe.train
    dtype, autocast = precision(settings.precision, world.device)
    model = GPT(config).to(device=world.device, dtype=dtype)
    module = Spread(model, World(device=world.device), compile=settings.compile).module
    optimizers = Optimizers.build(model, recipe.optim, batch_tokens=settings.batch_tokens, width=config.dim)
    ids = torch.randint(config.vocab_size, (rows, config.context), device=world.device)
    targets = torch.randint(config.vocab_size, (rows, config.context), device=world.device)

    def action() -> None:
        for _ in range(passes):
            with autocast():
                loss = module(ids, targets_BT=targets)
            (loss / passes).backward()
        # The last step of a run has the smallest learning rate: nothing drifts away while it is timed.
        optimizers.step(settings.steps - 1, settings.steps)
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)

    return action


def _size(study: Study, vocab_size: int, world: World, num_groups: int) -> tuple[int, int, int] | None:
    """Rows, passes and rounds of a measurement that fits the budget, from two short residual steps."""
    recipe = study.recipe
    split = plan.split(recipe, max(1, recipe.data.shares))
    config = recipe.model.with_(preset="residual", num_streams=1, router={}, vocab_size=vocab_size)

    def seconds(rows: int) -> float:
        run = Run(step_of(recipe, config, world, rows, 1))
        run.turn()
        return DEARER * num_groups * run.turn()

    with waiting("cost: how long is a step?"):
        one = seconds(1)
        allowed = BUDGET / (WARMUP + ROUNDS)
        if one > allowed:
            return None
        few = min(split.rows, 4)
        slope = max(1e-9, (seconds(few) - one) / (few - 1)) if few > 1 else one
    fixed = max(0.0, one - slope)
    rows, passes = split.rows, split.passes
    fitting = max(1, math.floor((allowed - fixed) / slope))
    if fitting < rows * passes:
        rows, passes = min(rows, fitting), max(1, fitting // rows)
    rounds = math.floor(BUDGET / (fixed + slope * rows * passes)) - WARMUP
    return rows, passes, min(MOST_ROUNDS, max(ROUNDS, rounds))


def _quartiles(values: dict[str, float]) -> dict[str, float]:
    return {name: values[name] for name in ("median", "low", "high")}
