"""`temper train`: trains a recipe, each field of which is an option."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import tyro

from temper_lab import plugins
from temper_lab import recipe as recipes
from temper_lab.cli import UsageError, function_of, value_of
from temper_lab.cli.options import usage
from temper_lab.recipe import Recipe
from temper_lab.train import run_dir
from temper_lab.train.run_dir import RunFolder

HELP = """Pretrain a model, or resume a run.

A recipe has every setting, and each of its fields is an option:

    temper train --recipe cpu-smoke --out runs/smoke
    temper train --recipe cpu-small --out runs/cp --model temper-cp:rank=8 --train.steps 50
    temper train --recipe my-recipe.toml --out runs/mine --train.tensorboard

Start from the weights, model and tokenizer of another run or model folder:

    temper train --recipe cpu-small --out runs/more --train.start models/plain-n4

Ctrl-C saves a checkpoint. Continue from the newest one, bit for bit, with the recipe that the run has saved:

    temper train --out runs/smoke --resume

Print what it would cost, without training:

    temper train --recipe paper-n4 --dry-run
    temper train --recipe paper-n4 --dry-run --gpu H100 --nodes 2 --data.num-shards 16

Train with several processes, replicated (DDP) or sharded (FSDP2):

    torchrun --nproc-per-node 2 -m temper_lab train --recipe cpu-smoke --out runs/two
    torchrun --nproc-per-node 4 -m temper_lab train --recipe paper-n8 --out runs/n8 --train.parallel fsdp

Resume from the newest checkpoint when a process is lost:

    torchrun --nproc-per-node 4 --max-restarts 3 -m temper_lab train --recipe paper-n8 --out runs/n8

Recipes: {names}.

Args:
    recipe: A built-in recipe or a TOML file. --help after it shows its values.
    out: The folder of the run.
    model: The method: a preset, or one with overrides such as mhc:generator=cp:mixer=kronecker:rank=2. It replaces
        --model.preset and --model.router of the recipe.
    resume: Continue the run in --out.
    dry_run: Print parameters, FLOPs, memory and time, and stop.
    gpu: With --dry-run: the GPU to plan for, A100, H100, H200 or B200.
    nodes: With --gpu: the number of nodes.
    gpus_per_node: With --gpu: the number of GPUs in a node.
    pipeline: With --gpu: stages that the blocks are spread over, for trainers that have them.
    as_json: Print the result as JSON.
"""


def prepare(words: list[str]) -> Callable[..., int]:
    """Makes the function for tyro whose defaults are those of the recipe that the arguments name."""
    name, out = value_of(words, "recipe"), value_of(words, "out")
    is_resumed = "--resume" in words
    if name is not None:
        base = recipes.load(name)
    elif is_resumed and out is not None and RunFolder(Path(out)).is_run:
        base, name = _of_run(RunFolder(Path(out)))
    elif "--help" in words or "-h" in words:
        base = recipes.load("cpu-smoke")
    elif is_resumed:
        raise ValueError(f"{out or '--out'} holds no run to resume (no run.json)")
    else:
        _check_names(words)
        raise UsageError(f"--recipe is missing; expected a TOML file or one of {', '.join(recipes.names())}")
    if (start := value_of(words, "train.start")) and not is_resumed:
        base = _started(base, start)
    if (method := value_of(words, "model")) is not None:
        if value_of(words, "model.preset") is not None:
            raise ValueError("--model and --model.preset both name a method; leave one out")
        base = replace(base, model=base.model.with_(preset=method, router={}, routers={}))

    def command(
        settings: Annotated[Recipe, tyro.conf.arg(name="")] = base,
        recipe: str | None = None,
        out: Path | None = None,
        model: Annotated[str | None, tyro.conf.arg(metavar="METHOD")] = None,
        resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
        dry_run: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
        gpu: str | None = None,
        nodes: int = 1,
        gpus_per_node: int = 8,
        pipeline: int = 1,
        as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
    ) -> int:
        title = recipe or name or "recipe"
        if gpu is None and (nodes, gpus_per_node, pipeline) != (1, 8, 1):
            raise ValueError("--nodes, --gpus-per-node and --pipeline describe a cluster; expected --gpu with them")
        if dry_run:
            return plan(settings, title, gpu, nodes, gpus_per_node, pipeline, as_json=as_json)
        if gpu is not None:
            raise ValueError("--gpu is for a plan; expected --dry-run with it")
        return train(settings, out, resume=resume, recipe_name=title, as_json=as_json)

    command.__doc__ = HELP.format(names=", ".join(recipes.names()))
    return command


def plan(
    recipe: Recipe,
    recipe_name: str,
    gpu: str | None = None,
    nodes: int = 1,
    gpus_per_node: int = 8,
    pipeline: int = 1,
    *,
    as_json: bool = False,
) -> int:
    """Prints what a recipe would take, here or on a cluster."""
    from temper_lab.train import cluster
    from temper_lab.train.plan import check_here

    check_here(recipe)
    where = None if gpu is None else cluster.Cluster(cluster.device_named(gpu), nodes, gpus_per_node, pipeline)
    lines, found = cluster.dry_run(recipe, where)
    about = {"recipe": recipe_name, "plan": lines, "estimate": cluster.as_dict(found)}
    print(json.dumps(about, indent=2) if as_json else "\n".join(lines))
    return 0


def train(recipe: Recipe, out: Path | None, *, resume: bool, recipe_name: str, as_json: bool = False) -> int:
    """Trains a completely specified recipe."""
    if out is None:
        raise UsageError("--out is missing; expected a folder for the run")
    from temper_lab.train.trainer import train as run

    # torchrun --max-restarts runs the same command again after a process was lost.
    resume = resume or (os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and RunFolder(out).is_run)
    code = run(recipe, out, resume=resume, recipe_name=recipe_name)
    if os.environ.get("RANK", "0") == "0":
        _show(RunFolder(out), recipe, as_json)
    return code


def _show(folder: RunFolder, recipe: Recipe, as_json: bool) -> None:
    """Prints the result on stdout, for scripts."""
    about = folder.read()
    rows = run_dir.read_log(folder.metrics)
    bpbs = run_dir.values(rows, "val_bpb", folder.metrics)
    is_finished = about["status"] == "finished"
    found = {
        "run": str(folder.path),
        "status": about["status"],
        "steps": about["step"],
        "tokens": about["step"] * recipe.train.batch_tokens,
        "bpb": bpbs[-1] if bpbs else None,
        "best_bpb": about["best_bpb"],
        "model": str(folder.path / "model") if is_finished else None,
    }
    if as_json:
        print(json.dumps(found, indent=2))
    elif is_finished:
        bpb = f"bpb {bpbs[-1]:.4f}, " if bpbs else ""
        print(f"{bpb}{found['steps']:,} steps, {found['tokens']:,} tokens, model {found['model']}")


def _check_names(words: list[str]) -> None:
    """Raises UsageError for an option that there is not; without a recipe nothing else would look at the options."""
    known = {flag for option in usage(*function_of("train")).options for flag in option.flags}
    for word in words:
        name = word.partition("=")[0].replace("_", "-")
        if name.startswith("--") and name not in known:
            near = difflib.get_close_matches(name, known, n=2)
            hint = f"; did you mean {' or '.join(near)}?" if near else "; temper train --help lists them"
            raise UsageError(f"there is no option {name}{hint}")


def _started(recipe: Recipe, start: str) -> Recipe:
    """The recipe with the model and the tokenizer of the initial weights."""
    from temper_lab.train.model_dir import load

    model, _ = load(start)
    # The recipe's number of tokens per step, in rows of the model's own context.
    unit = model.config.context * max(recipe.data.num_shards, 1)
    tokens = max(1, round(recipe.train.batch_tokens / unit)) * unit
    train, tokenizer = replace(recipe.train, batch_tokens=tokens), replace(recipe.tokenizer, path=start)
    return replace(recipe, model=model.config, train=train, tokenizer=tokenizer)


def _of_run(folder: RunFolder) -> tuple[Recipe, str]:
    about = folder.read()
    with plugins.recorded(about.get("imports")):
        return Recipe.from_dict(folder.recipe(), f"{folder.path}/run.json"), str(about.get("recipe_name"))
