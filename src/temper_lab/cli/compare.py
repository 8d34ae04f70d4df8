"""`temper compare`: methods trained side by side."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import tyro

from temper_lab import plugins
from temper_lab import recipe as recipes
from temper_lab.cli import UsageError, value_of
from temper_lab.recipe import Recipe
from temper_lab.study.environment import ExecutionOptions
from temper_lab.study.grid import override, read_grid
from temper_lab.study.spec import Study, claims_of
from temper_lab.study.vary import MACHINE, OWN

HELP = """Train routing methods side by side, with the same data, steps, seeds and initial backbone weights.

One command, a grid of runs:

    temper compare --recipe demo --out demo
    temper compare --recipe cpu-small --out runs/mine --methods residual,mhc,temper-cp --streams 4 8 --seeds 0 1 2
    temper compare --recipe cpu-small --out runs/ranks --methods temper-cp temper-cp:rank=8 temper-tucker:rank=2x12

A method is a preset with optional overrides: temper-cp:rank=8, mhc:method=newton, temper-cp:rank=8:gain=none.
Every field of the recipe is an option, as in `temper train`. Ctrl-C saves checkpoints. This continues, and
trains nothing twice:

    temper compare --out demo

Any field that changes what a run trains can be an axis. Each --vary names a field and its values; several of them give
every combination. A value that the recipe has anyway is the same run as without --vary and is not trained again:

    temper compare --recipe demo --out runs/lr --methods residual,mhc --vary optim.matrix_lr=0.02,0.05,0.1
    temper compare --recipe demo --out runs/two --vary model.depth=2,4 --vary optim.routing_lr=0.01,0.1

Add methods, streams, seeds or values to an existing study:

    temper compare --out demo --seeds 0 1 2
    temper compare --out demo --vary train.steps=70,280

Runs are trained in the order of the grid, block after block and seed by seed, so that the runs that have finished
when time runs out can be compared.

A recipe can state what the study should show ([[compare.claims]], see docs/lab/compare.md); its claims are tested at
the end.

Continue a study on another machine, or use the runs of an earlier one: what its results.json has finished, with the
same recipe, is taken over and not trained again. These runs have no model here, so CORE and the report's routing
explorer leave them out:

    temper compare --recipe study-cpu --out runs/study --known docs/results/study-cpu.json

Print what it would take, without training:

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
    seeds: Seeds of the initial weights and of the order of the data.
    vary: A field of the recipe and the values to train with, such as optim.matrix_lr=0.02,0.05,0.1. Repeat the option
        for several fields. It replaces the varied fields of the recipe or the study. With model.width at 0,
        model.depth varies the width too (64 x depth).
    jobs: Runs at a time; 0 means one per core, and one on GPUs.
    launch: The command that starts a run, before `-m`: torchrun and its options.
    cost: After the runs, time a training step of every method in turn, for about a minute.
    core: A CORE bundle (a folder or a zip) on which every finished run is evaluated once.
    max_per_task: The most items to use of each CORE task.
    known: A results.json, or a folder that has one, whose finished runs are taken over. Repeat the option for several
        files. A file of another recipe or of other data is refused.
    dry_run: Print the grid with parameters and time, and stop.
    as_json: Print the content of results.json, and nothing else, on stdout.
"""

# Options of one execution, not of the study; True for one that takes a value.
EXECUTION = {"jobs": True, "launch": True, "core": True, "max-per-task": True, "known": True}
EXECUTION |= {"json": False, "no-json": False, "cost": False, "no-cost": False, "dry-run": False}


def prepare(words: list[str]) -> Callable[..., int]:
    """Makes the function for tyro whose defaults are those of the recipe, or of the existing study."""
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
        raise UsageError(f"--recipe is missing; expected a TOML file or one of {', '.join(recipes.names())}")

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
        known: Annotated[tyro.conf.UseAppendAction[list[Path]], tyro.conf.arg(metavar="RESULTS.JSON")] = [],  # noqa: B006
        dry_run: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
        as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
    ) -> int:
        _check_fixed(base, settings)
        title = Path(recipe or "recipe").stem
        # Options may narrow the grid; the recipe's claims refer to its full grid.
        claims = claims_of(section, settings, recipe or title)
        grid = stored.grid if recipe is None and stored else read_grid(section, settings, recipe or title)
        grid = override(grid, methods, streams, seeds, vary)
        text = shlex.join(["temper", "compare", *_lasting(words), *plugins.words()])
        asked = Study(title, settings, grid, (text,), claims)
        study = asked if stored is None else _more(stored, asked, folder)
        execution = _execution(settings.train.threads, jobs, launch, cost, core, max_per_task, known)
        return compare(study, out, execution, dry_run=dry_run, as_json=as_json)

    command.__doc__ = HELP.format(names=", ".join(recipes.names()))
    return command


def compare(
    study: Study, out: Path | None, execution: ExecutionOptions, *, dry_run: bool, as_json: bool = False
) -> int:
    """Runs a completely specified study."""
    if dry_run:
        if as_json:
            raise ValueError("--json is for the results, and --dry-run trains nothing: leave one of them out")
        from temper_lab.study.run import forecast

        forecast(study, out, execution)
        return 0
    if out is None:
        raise UsageError("--out is missing; expected a folder for the study")
    from temper_lab.study.run import compare as run

    if not as_json:
        return run(study, out, execution)
    from temper_lab.study.results import Results

    # Tables go to stderr with the progress; stdout is for the result.
    with redirect_stdout(sys.stderr):
        code = run(study, out, execution)
    print(json.dumps(Results.read(out).to_dict(), indent=2))
    return code


def _more(stored: Study, asked: Study, folder: str | None) -> Study:
    """The existing study, extended by this one's new runs and claims."""
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


def _execution(
    threads: int,
    jobs: int,
    launch: str,
    cost: bool,
    core: Path | None,
    max_per_task: int | None,
    known: list[Path],
) -> ExecutionOptions:
    if jobs < 0:
        raise ValueError(f"--jobs is {jobs}; expected at least 1, or 0 for as many as there are cores")
    if max_per_task is not None and max_per_task < 1:
        raise ValueError(f"--max-per-task is {max_per_task}; expected at least 1")
    if max_per_task is not None and core is None:
        raise ValueError("--max-per-task needs --core, which is not given")
    if core is not None and not core.exists():
        raise ValueError(f"there is no {core}; expected the folder of an evaluation bundle or a zip of it")
    launcher = tuple(shlex.split(launch))
    if launcher and shutil.which(launcher[0]) is None:
        raise ValueError(f"--launch is {launch!r}, and there is no program {launcher[0]!r} here")
    return ExecutionOptions(jobs, threads, launcher, cost, core, max_per_task, tuple(known))


def _lasting(words: list[str]) -> list[str]:
    """The arguments that change a number of the study."""
    kept, is_value = [], False
    for word in words:
        name, sign, _ = word.partition("=")
        option = name.removeprefix("--").replace("_", "-") if name.startswith("--") else ""
        if option:
            is_value = False
        if option in EXECUTION:
            is_value = EXECUTION[option] and not sign
        elif is_value:
            is_value = False
        else:
            kept.append(word)
    return kept
