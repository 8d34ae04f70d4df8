"""`temper train`: a recipe, every field of which is an option."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from temper_lab import recipe as recipes
from temper_lab.cli.tables import registry
from temper_lab.recipe import Recipe
from temper_lab.run import RunFolder

HELP = """Pretrain a model, or resume a run.

A recipe decides everything, and every field of it is an option:

    temper train --recipe cpu-smoke --out runs/smoke
    temper train --recipe cpu-small --out runs/cp --model.preset temper-cp --train.steps 50
    temper train --recipe my-recipe.toml --out runs/mine --train.tensorboard

With the weights of another run or model folder, whose model and tokenizer it then has:

    temper train --recipe cpu-small --out runs/more --train.start models/plain-n4

Ctrl-C saves a checkpoint. Continue from the newest one, bit for bit; the run knows its recipe:

    temper train --out runs/smoke --resume

What it would cost, without doing it:

    temper train --recipe paper-n4 --dry-run

Many processes, copied (DDP) or sharded (FSDP2):

    torchrun --nproc-per-node 2 -m temper_lab train --recipe cpu-smoke --out runs/two
    torchrun --nproc-per-node 4 -m temper_lab train --recipe paper-n8 --out runs/n8 --train.parallel fsdp

Where processes may be lost, --max-restarts resumes the run from its newest checkpoint:

    torchrun --nproc-per-node 4 --max-restarts 3 -m temper_lab train --recipe paper-n8 --out runs/n8

Recipes: {names}.

Args:
    recipe: A built-in recipe or a TOML file. --help after it shows its values.
    out: The folder of the run.
    resume: Continue the run in --out.
    dry_run: Print parameters, FLOPs, memory and time, and stop.
"""


def prepare(words: list[str]) -> tuple[Callable[..., int], dict[str, Any]]:
    """The function whose defaults are those of the recipe that the arguments name, for tyro."""
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
        raise ValueError(f"--recipe is missing; expected a TOML file or one of {', '.join(recipes.names())}")
    if (start := value_of(words, "train.start")) and not is_resumed:
        base = _started(base, start)

    def command(
        settings: Annotated[Recipe, tyro.conf.arg(name="")] = base,
        recipe: str | None = None,
        out: Path | None = None,
        resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
        dry_run: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    ) -> int:
        return train(settings, out, resume=resume, dry_run=dry_run, recipe_name=recipe or name or "recipe")

    command.__doc__ = HELP.format(names=", ".join(recipes.names()))
    return command, {"registry": registry()}


def train(recipe: Recipe, out: Path | None, *, resume: bool, dry_run: bool, recipe_name: str) -> int:
    """Runs a recipe that is complete."""
    if dry_run:
        from temper_lab.plan import check_here
        from temper_lab.plan import dry_run as lines

        check_here(recipe)
        print("\n".join(lines(recipe)))
        return 0
    if out is None:
        raise ValueError("--out is missing; expected a folder for the run")
    from temper_lab.train import train as run

    # torchrun --max-restarts gives the same command again after a process was lost.
    resume = resume or (os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and RunFolder(out).is_run)
    return run(recipe, out, resume=resume, recipe_name=recipe_name)


def _started(recipe: Recipe, start: str) -> Recipe:
    """The recipe with the model and the tokenizer that the first weights belong to."""
    from temper_lab.load import load

    model, _ = load(start)
    # As many tokens a step as the recipe has, in rows of the model's own length.
    portion = model.config.context * max(recipe.data.shares, 1)
    tokens = max(1, round(recipe.train.batch_tokens / portion)) * portion
    train, tokenizer = replace(recipe.train, batch_tokens=tokens), replace(recipe.tokenizer, path=start)
    return replace(recipe, model=model.config, train=train, tokenizer=tokenizer)


def _of_run(folder: RunFolder) -> tuple[Recipe, str]:
    return Recipe.from_dict(folder.recipe(), f"{folder.path}/run.json"), str(folder.read().get("recipe_name"))


def value_of(words: list[str], option: str) -> str | None:
    """What the arguments give for an option, before they are parsed for good."""
    found = None
    for index, word in enumerate(words):
        if word == f"--{option}" and index + 1 < len(words):
            found = words[index + 1]
        elif word.startswith(f"--{option}="):
            found = word.partition("=")[2]
    return found
