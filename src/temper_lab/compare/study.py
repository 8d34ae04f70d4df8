"""What a study trains: a recipe, and a grid of methods, streams, seeds and fields. `study.json` holds it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import temper
from temper.mixers import Mixer
from temper.registry import unknown
from temper_lab.compare import vary as varying
from temper_lab.compare.method import Method, parse_all
from temper_lab.compare.vary import Axes, Settings
from temper_lab.io import FileError, atomic_write, brief, dumps, entry, read_json
from temper_lab.model import ModelConfig
from temper_lab.recipe import Recipe, field_types
from temper_lab.report.claims import Claim, Record, joined, read_claims
from temper_lab.run import RunFolder

FORMAT = "temper-study-1"
FILE_NAME = "study.json"
METHODS = ("residual", "mhc", "kromhc", "temper-cp", "temper-tucker")
LISTS = ("methods", "streams", "seeds")
AXES = (*LISTS, "vary")


@dataclass(frozen=True)
class Block:
    """Every method with every number of streams, every seed and every combination of varied fields."""

    methods: tuple[Method, ...]
    streams: tuple[int, ...]
    seeds: tuple[int, ...]
    vary: Axes = ()

    def __post_init__(self) -> None:
        for name, least in (("streams", 2), ("seeds", 0)):
            values = getattr(self, name)
            wrong = [v for v in values if isinstance(v, bool) or not isinstance(v, int) or v < least]
            if wrong or not values:
                given = repr(wrong[0]) if wrong else "nothing"
                note = " (residual has one stream, whatever N is)" if name == "streams" else ""
                raise ValueError(f"{name} has {given}; expected whole numbers >= {least}{note}")
            object.__setattr__(self, name, tuple(dict.fromkeys(values)))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], otherwise: Block) -> Block:
        """From a table of a recipe; an axis that is not in it is another block's."""
        for axis in LISTS:
            if not isinstance(values.get(axis, []), list):
                raise ValueError(f"{axis} is {brief(values[axis])}; expected a list")
        vary = values.get("vary")
        if vary is not None and not isinstance(vary, Mapping):
            raise ValueError(f'vary is {brief(vary)}; expected a table such as {{ "optim.matrix_lr" = [0.02, 0.05] }}')
        methods = values.get("methods")
        if methods is not None and not all(isinstance(method, str) for method in methods):
            raise ValueError(f"methods is {brief(methods)}; expected a list of strings")
        return cls(
            otherwise.methods if methods is None else parse_all(methods),
            tuple(values.get("streams", otherwise.streams)),
            tuple(values.get("seeds", otherwise.seeds)),
            otherwise.vary if vary is None else varying.read(vary),
        )

    def to_dict(self) -> dict[str, Any]:
        values = {"methods": [*map(str, self.methods)], "streams": [*self.streams], "seeds": [*self.seeds]}
        return {**values, **({"vary": varying.plain(self.vary)} if self.vary else {})}


Grid = tuple[Block, ...]


def read_grid(values: Mapping[str, Any], recipe: Recipe, source: str) -> Grid:
    """The grid of a section [compare]; what it leaves open is the recipe's, and the methods are the main ones."""
    streams = recipe.model.num_streams
    otherwise = Block(parse_all(METHODS), (streams if streams > 1 else 4,), (recipe.train.seed,))
    try:
        for key in values:
            if key not in (*AXES, "grid", "claims"):
                raise unknown("option of [compare]", key, (*AXES, "grid", "claims"))
        blocks = values.get("grid", [{}])
        if not isinstance(blocks, list) or not blocks or not all(isinstance(block, Mapping) for block in blocks):
            raise ValueError(f"grid is {brief(blocks)}; expected a list of tables with {', '.join(AXES)}")
        for key in (key for block in blocks for key in block if key not in AXES):
            raise unknown("option of a table of grid", key, AXES)
        shared = Block.from_dict(values, otherwise)
        return tuple(Block.from_dict(block, shared) for block in blocks)
    except ValueError as error:
        raise ValueError(f"{source}: [compare] {error}") from error


@dataclass(frozen=True)
class Cell:
    """One run of a study.

    Args:
        streams: the true N, which is 1 for a residual network.
        vary: the fields in which its recipe differs from that of the study.
    """

    method: Method
    streams: int
    seed: int
    vary: Settings = ()

    @property
    def key(self) -> str:
        return f"{self.method.label}-n{self.streams}-s{self.seed}{varying.suffix(self.vary)}"

    @property
    def group(self) -> tuple[Method, int, Settings]:
        """What all seeds of a mean have in common."""
        return self.method, self.streams, self.vary

    def __str__(self) -> str:
        settings = f" with {varying.describe(self.vary)}" if self.vary else ""
        return f"{self.method}, N={self.streams}, seed {self.seed}{settings}"


@dataclass(frozen=True)
class Study:
    """A recipe and the grid of its runs.

    Args:
        name: the recipe's.
        recipe: what all runs share; preset, streams, router, seed and varied fields are each run's own.
        commands: what made this study, and what added to it.
        claims: what it is to show.
    """

    name: str
    recipe: Recipe
    grid: Grid
    commands: tuple[str, ...] = ()
    claims: tuple[Claim, ...] = ()

    def __post_init__(self) -> None:
        if self.recipe.model.router:
            raise ValueError(
                f"model.router is {dict(self.recipe.model.router)!r}; in a study every method has its own overrides, "
                "such as temper-cp:rank=8"
            )
        labels: dict[str, Cell] = {}
        for cell in self.cells:
            other = labels.setdefault(cell.key, cell)
            if other != cell:
                raise ValueError(f"{other} and {cell} would both be the run {cell.key}")

    @cached_property
    def queue(self) -> tuple[Cell, ...]:
        """Every run once, in the order of training.

        Block after block of the grid, and within a block seed by seed: whatever has finished when time runs out has
        all methods of the same seeds.
        """
        return tuple(dict.fromkeys(cell for block in self.grid for cell in self._cells(block)))

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """Every run once, as tables have them: by method as they were asked for, streams, varied fields and seed."""
        methods = {method: index for index, method in enumerate(self.methods)}
        ranks = {name: {value: rank for rank, value in enumerate(values)} for name, values in self.axes}

        def place(cell: Cell) -> tuple[Any, ...]:
            values = ((ranks[name], self.value_of(cell, name)) for name in ranks)
            return methods[cell.method], cell.streams, *(rank.get(value, -1) for rank, value in values), cell.seed

        return tuple(sorted(self.queue, key=place))

    @cached_property
    def axes(self) -> Axes:
        """The varied fields, each with all values that runs have, the recipe's own among them if it is one."""
        names = dict.fromkeys(name for cell in self.queue for name, _ in cell.vary)
        found = {name: [self.value_of(cell, name) for cell in self.queue] for name in field_types() if name in names}
        return tuple(
            (name, varying.ordered(value for value in values if value is not None)) for name, values in found.items()
        )

    def value_of(self, cell: Cell, name: str) -> Any:
        """The value of a field in a run; None for one that the run does not depend on."""
        if self.routing(cell).mixer is None and name in varying.ROUTING:
            return None
        return self.settings_of(cell).field(name)

    def _cells(self, block: Block) -> Iterator[Cell]:
        for seed in block.seeds:
            for settings in varying.combinations(block.vary):
                for asked in block.streams:
                    for method in block.methods:
                        yield self._cell(method, asked, seed, varying.differing(settings, self.recipe))

    def _cell(self, method: Method, asked: int, seed: int, settings: Settings) -> Cell:
        model = varying.varied(self.recipe, settings).model
        try:
            routing = _model(model, method, asked).routing()
        except ValueError as error:
            at = f", {varying.describe(settings)}" if settings else ""
            raise ValueError(f"{method} at N={asked}{at}: {error}") from error
        if routing.mixer is None:
            settings = varying.of_residual(settings)
        return Cell(method, routing.num_streams, seed, settings)

    @property
    def methods(self) -> tuple[Method, ...]:
        return tuple(dict.fromkeys(method for block in self.grid for method in block.methods))

    @property
    def streams(self) -> list[int]:
        return sorted({n for block in self.grid for n in block.streams})

    @property
    def seeds(self) -> list[int]:
        return sorted({seed for block in self.grid for seed in block.seeds})

    def settings_of(self, cell: Cell) -> Recipe:
        """The recipe with what is varied in a run; its method and seed are still to come."""
        return varying.varied(self.recipe, cell.vary)

    def recipe_of(self, cell: Cell, folder: Path, threads: int | None = None) -> Recipe:
        """The recipe of a run in the study's folder."""
        recipe = self.settings_of(cell)
        model = _model(recipe.model, cell.method, cell.streams)
        train = replace(recipe.train, seed=cell.seed, threads=recipe.train.threads if threads is None else threads)
        tokenizer = replace(recipe.tokenizer, path=str(folder / "tokenizer"))
        return replace(recipe, model=model, train=train, tokenizer=tokenizer)

    def routing(self, cell: Cell) -> temper.RouterConfig:
        return _model(self.settings_of(cell).model, cell.method, cell.streams).routing()

    def refusal(self, cell: Cell) -> str | None:
        """Why a run is skipped, or None if it is not."""
        config = self.routing(cell)
        reason = None if config.mixer is None else Mixer.named(config.mixer.name).refusal(config.num_streams)
        if reason is None:
            return None
        count, sites = temper.count_parameters(config), self.settings_of(cell).model.num_sites
        return f"{reason} Here it would take {count:,} parameters per site, {sites * count:,} in {sites} sites."

    def extended(self, grid: Grid, command: str, claims: Sequence[Claim] = ()) -> Study:
        """With the runs of another grid and more claims; the same study if it has them all."""
        larger = replace(self, grid=(*self.grid, *grid), claims=joined(self.claims, claims))
        if set(larger.queue) == set(self.queue) and larger.claims == self.claims:
            return self
        return replace(larger, commands=(*self.commands, command))

    def recorded(self, folder: Path) -> Study:
        """With the date of claims that are new, and how many runs were there before them."""
        if all(claim.record for claim in self.claims):
            return self
        runs = [run for cell in self.cells if (run := run_folder(folder, cell)).is_run]
        finished = sum(run.read().get("status") == "finished" for run in runs)
        record = Record(datetime.now(UTC).date().isoformat(), len(runs), finished)
        return replace(self, claims=tuple(replace(claim, record=claim.record or record) for claim in self.claims))

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "name": self.name,
            "commands": [*self.commands],
            "grid": [block.to_dict() for block in self.grid],
            "claims": [claim.to_dict() for claim in self.claims],
            "recipe": self.recipe.to_dict(),
        }

    def write(self, folder: Path) -> None:
        atomic_write(folder / FILE_NAME, dumps(FILE_NAME, self.to_dict()))

    @classmethod
    def read(cls, folder: Path) -> Study | None:
        """The study in a folder; None if there is none yet."""
        path = folder / FILE_NAME
        if not path.exists():
            return None
        content = read_json(path)
        if content.get("format") != FORMAT:
            raise FileError(f"{path} has format {brief(content.get('format'))}, expected {FORMAT!r}")
        recipe = Recipe.from_dict(entry(content, "recipe", dict, path), str(path))
        grid = read_grid({"grid": entry(content, "grid", list, path)}, recipe, str(path))
        commands = entry(content, "commands", list, path)
        if not all(isinstance(command, str) for command in commands):
            raise FileError(f"{path}: 'commands' is {brief(commands)}; expected a list of texts")
        # Studies of earlier versions have no claims.
        claims = read_claims(content.get("claims", []))
        return cls(entry(content, "name", str, path), recipe, grid, tuple(commands), claims)


@cache
def _model(model: ModelConfig, method: Method, streams: int) -> ModelConfig:
    return model.with_(preset=method.preset, num_streams=streams, router=method.options)


def override(
    grid: Grid, methods: Sequence[str], streams: Sequence[int], seeds: Sequence[int], vary: Sequence[str] = ()
) -> Grid:
    """The grid with some axes replaced in every block; an empty one stays as it is."""
    given = {"methods": parse_all(methods) if methods else (), "streams": tuple(streams), "seeds": tuple(seeds)}
    given["vary"] = varying.parse(vary)
    changes = {axis: values for axis, values in given.items() if values}
    return tuple(dict.fromkeys(replace(block, **changes) for block in grid))


def run_folder(folder: Path, cell: Cell) -> RunFolder:
    return RunFolder(folder / "runs" / cell.key)
