"""What a study trains: a recipe, and a grid of methods, streams and seeds. `study.json` holds it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import temper
from temper.mixers import Mixer
from temper.registry import unknown
from temper_lab.compare.method import Method, parse_all
from temper_lab.io import FileError, atomic_write, brief, dumps, entry, read_json
from temper_lab.recipe import Recipe
from temper_lab.run import RunFolder

FORMAT = "temper-study-1"
FILE_NAME = "study.json"
METHODS = ("residual", "mhc", "kromhc", "temper-cp", "temper-tucker")
# Where a machine does its work, not what it does.
MACHINE = ("train.threads", "tokenizer.path")
AXES = ("methods", "streams", "seeds")


@dataclass(frozen=True)
class Block:
    """Every method with every number of streams and every seed."""

    methods: tuple[Method, ...]
    streams: tuple[int, ...]
    seeds: tuple[int, ...]

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
        for axis in AXES:
            if not isinstance(values.get(axis, []), list):
                raise ValueError(f"{axis} is {brief(values[axis])}; expected a list")
        methods = values.get("methods")
        if methods is not None and not all(isinstance(method, str) for method in methods):
            raise ValueError(f"methods is {brief(methods)}; expected a list of strings")
        return cls(
            otherwise.methods if methods is None else parse_all(methods),
            tuple(values.get("streams", otherwise.streams)),
            tuple(values.get("seeds", otherwise.seeds)),
        )

    def to_dict(self) -> dict[str, Any]:
        return {"methods": [*map(str, self.methods)], "streams": [*self.streams], "seeds": [*self.seeds]}


Grid = tuple[Block, ...]


def read_grid(values: Mapping[str, Any], recipe: Recipe, source: str) -> Grid:
    """The grid of a section [compare]; what it leaves open is the recipe's, and the methods are the main ones."""
    streams = recipe.model.num_streams
    otherwise = Block(parse_all(METHODS), (streams if streams > 1 else 4,), (recipe.train.seed,))
    try:
        for key in values:
            if key not in (*AXES, "grid"):
                raise unknown("option of [compare]", key, (*AXES, "grid"))
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
    """

    method: Method
    streams: int
    seed: int

    @property
    def key(self) -> str:
        return f"{self.method.label}-n{self.streams}-s{self.seed}"

    @property
    def group(self) -> tuple[Method, int]:
        """What the seeds are averaged over."""
        return self.method, self.streams


@dataclass(frozen=True)
class Study:
    """A recipe and the grid of its runs.

    Args:
        name: the recipe's.
        recipe: what all runs share; preset, streams, router and seed are each run's own.
        commands: what made this study, and what added to it.
    """

    name: str
    recipe: Recipe
    grid: Grid
    commands: tuple[str, ...] = ()

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
                raise ValueError(f"{other.method} and {cell.method} would both be the run {cell.key}")

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """Every run once: by method as they were asked for, then by streams and seed."""
        found = {cell: None for block in self.grid for cell in self._cells(block)}
        order = {method: index for index, method in enumerate(self.methods)}
        return tuple(sorted(found, key=lambda cell: (order[cell.method], cell.streams, cell.seed)))

    def _cells(self, block: Block) -> Iterator[Cell]:
        for method in block.methods:
            for asked in block.streams:
                try:
                    model = self.recipe.model.with_(preset=method.preset, num_streams=asked, router=method.options)
                except ValueError as error:
                    raise ValueError(f"{method} at N={asked}: {error}") from error
                streams = model.routing().num_streams
                yield from (Cell(method, streams, seed) for seed in block.seeds)

    @property
    def methods(self) -> tuple[Method, ...]:
        return tuple(dict.fromkeys(method for block in self.grid for method in block.methods))

    @property
    def streams(self) -> list[int]:
        return sorted({n for block in self.grid for n in block.streams})

    @property
    def seeds(self) -> list[int]:
        return sorted({seed for block in self.grid for seed in block.seeds})

    def recipe_of(self, cell: Cell, folder: Path, threads: int | None = None) -> Recipe:
        """The recipe of a run in the study's folder."""
        recipe = self.recipe
        model = recipe.model.with_(preset=cell.method.preset, num_streams=cell.streams, router=cell.method.options)
        train = replace(recipe.train, seed=cell.seed, threads=recipe.train.threads if threads is None else threads)
        tokenizer = replace(recipe.tokenizer, path=str(folder / "tokenizer"))
        return replace(recipe, model=model, train=train, tokenizer=tokenizer)

    def routing(self, cell: Cell) -> temper.RouterConfig:
        return _routing(cell.method, cell.streams, self.recipe.model.width)

    def refusal(self, cell: Cell) -> str | None:
        """Why a run is skipped, or None if it is not."""
        config = self.routing(cell)
        reason = None if config.mixer is None else Mixer.named(config.mixer.name).refusal(config.num_streams)
        if reason is None:
            return None
        count, sites = temper.count_parameters(config), 2 * self.recipe.model.num_layers
        return f"{reason} Here it would take {count:,} parameters per site, {sites * count:,} in {sites} sites."

    def extended(self, grid: Grid, command: str) -> Study:
        """With the runs of another grid too; the same study if it has them all."""
        larger = replace(self, grid=(*self.grid, *grid))
        if set(larger.cells) == set(self.cells):
            return self
        return replace(larger, commands=(*self.commands, command))

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "name": self.name,
            "commands": [*self.commands],
            "grid": [block.to_dict() for block in self.grid],
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
        return cls(entry(content, "name", str, path), recipe, grid, tuple(commands))


@cache
def _routing(method: Method, streams: int, dim: int) -> temper.RouterConfig:
    return temper.preset(method.preset, num_streams=streams, dim=dim, **method.options)


def override(grid: Grid, methods: Sequence[str], streams: Sequence[int], seeds: Sequence[int]) -> Grid:
    """The grid with some axes replaced in every block; an empty one stays as it is."""
    given = {"methods": parse_all(methods) if methods else (), "streams": tuple(streams), "seeds": tuple(seeds)}
    changes = {axis: values for axis, values in given.items() if values}
    return tuple(dict.fromkeys(replace(block, **changes) for block in grid))


def run_folder(folder: Path, cell: Cell) -> RunFolder:
    return RunFolder(folder / "runs" / cell.key)
