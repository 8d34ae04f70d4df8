"""Costs of the runs of a study: parameters, FLOPs, and the time of a training step."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch

import temper
from temper_lab.bench.measure import WARMUP, Run, interleave, milliseconds, pinned, ratios, spread
from temper_lab.console import keep_freed_memory, waiting
from temper_lab.distributed import ParallelModel, World, precision, process_group
from temper_lab.method import Method
from temper_lab.model import GPT, ModelConfig
from temper_lab.optim import Optimizers
from temper_lab.recipe import Recipe
from temper_lab.study.grid import Cell
from temper_lab.study.results import Cost, CostRow, Parameters, Quartiles
from temper_lab.study.spec import Study
from temper_lab.study.vary import has_own_step
from temper_lab.train.plan import plan_batch


def counts_of(study: Study, cell: Cell, vocab_size: int) -> Parameters:
    """The parameters of a run."""
    config, model = study.routing(cell), study.settings_of(cell).model
    added = model.num_sites * temper.count_parameters(config)
    stored = model.num_sites * temper.count_parameters(config, include_frozen=True)
    plain = {"preset": "residual", "num_streams": 1, "router": {}, "routers": {}}
    backbone = _backbone(model.with_(**plain, vocab_size=vocab_size))
    return Parameters(backbone + added, added, stored - added)


def flops_of(study: Study, cell: Cell, vocab_size: int) -> int:
    """The FLOPs of a training step per token, for a run that is not skipped."""
    return _flops(study.settings_of(cell).model, cell.method, cell.num_streams, vocab_size)


@cache
def _flops(model: ModelConfig, method: Method, num_streams: int, vocab_size: int) -> int:
    changes = {"preset": method.preset, "num_streams": num_streams, "router": method.options, "vocab_size": vocab_size}
    with torch.device("meta"):
        return GPT(model.with_(**changes)).flops_per_token()


@cache
def _backbone(model: ModelConfig) -> int:
    """The number of parameters of a residual model."""
    with torch.device("meta"):
        return GPT(model).num_parameters()["total"]


RESIDUAL = (Method("residual"), 1)
# The approximate budget in seconds, and the fewest rounds. If those take longer, a step gets fewer tokens.
BUDGET, ROUNDS, MOST_ROUNDS = 60.0, 5, 15
# The assumed cost of a method relative to the residual network, which is timed first.
DEARER = 1.3

Group = tuple[Method, int]


def groups_of(study: Study) -> list[Group]:
    """The cases to measure: every method and N of runs whose step is that of the recipe."""
    cells = (cell for cell in study.cells if not study.refusal(cell) and not has_own_step(cell.vary))
    return list(dict.fromkeys((cell.method, cell.num_streams) for cell in cells))


def measure(study: Study, vocab_size: int, threads: int) -> Cost | None:
    """The entry "cost" of the results; None if even one row of tokens per step would take too long."""
    asked = groups_of(study)
    if not asked:
        return None
    groups = list(dict.fromkeys([RESIDUAL, *asked]))
    recipe = study.recipe
    keep_freed_memory()
    with (
        pinned(threads or torch.get_num_threads()),
        process_group(recipe.train.device) as world,
        torch.random.fork_rng(devices=[]),
    ):
        torch.manual_seed(0)
        sized = _size(study, vocab_size, world, len(groups))
        if sized is None:
            return None
        rows, grad_accum_steps, rounds = sized
        runs = {}
        for method, streams in groups:
            config = recipe.model.with_(
                preset=method.preset, num_streams=streams, router=method.options, vocab_size=vocab_size
            )
            runs[method, streams] = Run(step_of(recipe, config, world, rows, grad_accum_steps))
        seconds = interleave(runs, rounds, "cost of a step")

    def row(group: Group) -> CostRow:
        ratio = spread(ratios(seconds[group], seconds[RESIDUAL]))
        return CostRow(str(group[0]), group[1], _quartiles(milliseconds(seconds[group])), _quartiles(ratio))

    setting = {
        "times": "forward + backward + optimizer",
        "tokens": rows * grad_accum_steps * recipe.model.context,
        "context": recipe.model.context,
        "depth": recipe.model.depth,
        "width": recipe.model.dim,
        "vocab_size": vocab_size,
        "rounds": rounds,
        "threads": threads,
        "device": world.device.type,
    }
    return Cost(setting, tuple(row(group) for group in asked))


def step_of(recipe: Recipe, config: ModelConfig, world: World, rows: int, grad_accum_steps: int) -> Callable[[], None]:
    """A training step on random tokens, of one process."""
    settings = recipe.train
    dtype, autocast = precision(settings.precision, world.device)
    model = GPT(config).to(device=world.device, dtype=dtype)
    module = ParallelModel(model, World(device=world.device), compile=settings.compile).module
    optimizers = Optimizers.build(model, recipe.optim, batch_tokens=settings.batch_tokens, width=config.dim)
    ids = torch.randint(config.vocab_size, (rows, config.context), device=world.device)
    targets = torch.randint(config.vocab_size, (rows, config.context), device=world.device)

    def action() -> None:
        for _ in range(grad_accum_steps):
            with autocast():
                loss = module(ids, targets_BT=targets)
            (loss / grad_accum_steps).backward()
        # The last step of the schedule has the smallest learning rate, so that timing hardly changes the weights.
        optimizers.step(settings.steps - 1, settings.steps)
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)

    return action


def _size(study: Study, vocab_size: int, world: World, num_groups: int) -> tuple[int, int, int] | None:
    """Rows, grad_accum_steps and rounds of a measurement that fits the budget, from two short residual steps."""
    recipe = study.recipe
    batch = plan_batch(recipe, max(1, recipe.data.num_shards))
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
        few = min(batch.device_batch_size, 4)
        slope = max(1e-9, (seconds(few) - one) / (few - 1)) if few > 1 else one
    fixed = max(0.0, one - slope)
    rows, grad_accum_steps = batch.device_batch_size, batch.grad_accum_steps
    fitting = max(1, math.floor((allowed - fixed) / slope))
    if fitting < rows * grad_accum_steps:
        rows, grad_accum_steps = min(rows, fitting), max(1, fitting // rows)
    rounds = math.floor(BUDGET / (fixed + slope * rows * grad_accum_steps)) - WARMUP
    return rows, grad_accum_steps, min(MOST_ROUNDS, max(ROUNDS, rounds))


def _quartiles(values: dict[str, float]) -> Quartiles:
    return Quartiles(values["median"], values["low"], values["high"])
