"""`temper compare`: methods trained side by side."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import tyro

from temper_lab import recipe as recipes
from temper_lab.cli.tables import registry
from temper_lab.cli.train import value_of
from temper_lab.compare.claims import claims_of
from temper_lab.compare.session import Session
from temper_lab.compare.study import Study, override, read_grid
from temper_lab.compare.vary import MACHINE, OWN
from temper_lab.recipe import Recipe

HELP = """Train routing methods side by side: the same data, steps, seeds and first weights of the backbone.

One command, a grid of runs:

    temper compare --recipe demo --out demo
    temper compare --recipe cpu-small --out runs/mine --methods residual,mhc,temper-cp --streams 4 8 --seeds 0 1 2
    temper compare --recipe cpu-small --out runs/ranks --methods temper-cp temper-cp:rank=8 temper-tucker:rank=2x12

A method is a preset, and what is changed in it: temper-cp:rank=8, mhc:method=newton, temper-cp:rank=8:gain=none.
Every field of the recipe is an option, as in `temper train`. Ctrl-C saves checkpoints; this goes on, and trains
nothing twice:

    temper compare --out demo

Any field of the recipe can be an axis of the grid. Each --vary names a field and its values; several of them give
every combination. A value that the recipe has anyway is the same run as without --vary and is not trained again:

    temper compare --recipe demo --out runs/lr --methods residual,mhc --vary optim.matrix_lr=0.02,0.05,0.1
    temper compare --recipe demo --out runs/two --vary model.depth=2,4 --vary optim.routing_lr=0.01,0.1

More methods, streams, seeds or values for a study that is there:

    temper compare --out demo --seeds 0 1 2
    temper compare --out demo --vary train.steps=70,280

Runs are trained in the order of the grid, block after block and seed by seed, so that what has finished when time
runs out can be compared.

A recipe can state what the study should show ([[compare.claims]], see docs/lab/compare.md); its claims are tested at
the end.

What it would take, without doing it:

    temper compare --recipe study-cpu --dry-run

On GPUs, one run after the other:

    temper compare --recipe table1-paper-n4 --out runs/table1 --launch "torchrun --nproc-per-node 4"

Recipes: {names}.

Args:
    recipe: A built-in recipe or a TOML file; its section [compare] has the methods, streams, seeds, varied fields and
        claims.
    out: The folder of the study: results.json, runs/, logs/, tokenizer/.
    methods: Presets with overrides, separated by commas or spaces. Left out: those of the recipe or the study.
    streams: Numbers of streams N; the residual preset has one stream and runs once.
    seeds: Of the first weights and of the order of the data.
    vary: A field of the recipe and the values to train with, such as optim.matrix_lr=0.02,0.05,0.1. Repeat the option
        for several fields. It replaces what the recipe or the study varies.
    jobs: Runs at a time; 0 for as many as there are cores, and for 1 on GPUs.
    launch: What starts a run, before `-m`: torchrun and its options.
    cost: After the runs, time a training step of all methods, taking turns, for about a minute.
    core: A CORE bundle, its folder or a zip: finished runs are evaluated, each once.
    max_per_task: Only so many items of each task of CORE.
    dry_run: Print the grid with parameters and time, and stop.
"""

# Of a session, not of a study; with whether a value follows.
SESSION = {"jobs": True, "launch": True, "core": True, "max-per-task": True}
SESSION |= {"cost": False, "no-cost": False, "dry-run": False}


def prepare(words: list[str]) -> tuple[Callable[..., int], dict[str, Any]]:
    """The function whose defaults are those of the recipe, or of the study that is there, for tyro."""
    name, folder = value_of(words, "recipe"), value_of(words, "out")
    stored = Study.read(Path(folder)) if folder is not None else None
    section: Mapping[str, Any] = {}
    if name is not None:
        base, section = recipes.load_study(name)
    elif stored is not None:
        base = stored.recipe
    elif "--help" in words or "-h" in words:
        base = recipes.load("cpu-smoke")
    elif folder is not None and Path(folder).exists():
        raise ValueError(f"{folder} holds no study to continue (no study.json); --recipe begins one")
    else:
        raise ValueError(f"--recipe is missing; expected a TOML file or one of {', '.join(recipes.names())}")

    def command(
        settings: Annotated[Recipe, tyro.conf.arg(name="")] = base,
        recipe: str | None = None,
        out: Path | None = None,
        methods: Annotated[list[str], tyro.conf.arg(metavar="METHOD")] = [],  # noqa: B006 - tyro shows it in --help
        streams: Annotated[list[int], tyro.conf.arg(metavar="N")] = [],  # noqa: B006
        seeds: Annotated[list[int], tyro.conf.arg(metavar="SEED")] = [],  # noqa: B006
        vary: Annotated[tyro.conf.UseAppendAction[list[str]], tyro.conf.arg(metavar="FIELD=VALUE,VALUE")] = [],  # noqa: B006
        jobs: int = 0,
        launch: str = "",
        cost: bool = True,
        core: Path | None = None,
        max_per_task: int | None = None,
        dry_run: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    ) -> int:
        _check_fixed(base, settings)
        is_continued = recipe is None and stored is not None
        title = Path(recipe or "recipe").stem
        # Options may narrow the grid; the recipe's claims are about its own.
        claims = claims_of(section, settings, recipe or title)
        grid = stored.grid if is_continued else read_grid(section, settings, recipe or title)
        grid = override(grid, methods, streams, seeds, vary)
        text = shlex.join(["temper", "compare", *_lasting(words)])
        asked = Study(title, settings, grid, (text,), claims)
        study = asked if stored is None else _more(stored, asked, folder)
        session = _session(settings.train.threads, jobs, launch, cost, core, max_per_task)
        return compare(study, out, session, dry_run=dry_run)

    command.__doc__ = HELP.format(names=", ".join(recipes.names()))
    return command, {"registry": registry()}


def compare(study: Study, out: Path | None, session: Session, *, dry_run: bool) -> int:
    """Runs a study that is complete."""
    if dry_run:
        from temper_lab.compare.forecast import forecast

        forecast(study, out, session)
        return 0
    if out is None:
        raise ValueError("--out is missing; expected a folder for the study")
    from temper_lab.compare.run import compare as run

    return run(study, out, session)


def _more(stored: Study, asked: Study, folder: str | None) -> Study:
    """The study that is there, with what is new in this one."""
    if changes := stored.recipe.changes(asked.recipe, MACHINE):
        raise ValueError(f"{folder} is a study of another recipe: {'; '.join(changes)}. Another --out starts anew")
    try:
        return stored.extended(asked.grid, asked.commands[0], asked.claims)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


def _check_fixed(base: Recipe, settings: Recipe) -> None:
    for name, axis in OWN.items():
        if base.field(name) != settings.field(name):
            raise ValueError(f"--{name.replace('_', '-')} is every run's own here; use --{axis}")


def _session(threads: int, jobs: int, launch: str, cost: bool, core: Path | None, max_per_task: int | None) -> Session:
    if jobs < 0:
        raise ValueError(f"--jobs is {jobs}; expected at least 1, or 0 for as many as there are cores")
    if max_per_task is not None and max_per_task < 1:
        raise ValueError(f"--max-per-task is {max_per_task}; expected at least 1")
    if max_per_task is not None and core is None:
        raise ValueError("--max-per-task is of --core, which is not given")
    if core is not None and not core.exists():
        raise ValueError(f"there is no {core}; expected the folder of an evaluation bundle or a zip of it")
    launcher = tuple(shlex.split(launch))
    if launcher and shutil.which(launcher[0]) is None:
        raise ValueError(f"--launch is {launch!r}, and there is no program {launcher[0]!r} here")
    return Session(jobs, threads, launcher, cost, core, max_per_task)


def _lasting(words: list[str]) -> list[str]:
    """The arguments without those that change no number."""
    kept, is_value = [], False
    for word in words:
        name, sign, _ = word.partition("=")
        option = name.removeprefix("--").replace("_", "-") if name.startswith("--") else ""
        if option:
            is_value = False
        if option in SESSION:
            is_value = SESSION[option] and not sign
        elif is_value:
            is_value = False
        else:
            kept.append(word)
    return kept
