"""The grid of a study: methods, streams, seeds and varied fields, and the runs that they give."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from temper.registry import is_int, unknown
from temper_lab.io import brief
from temper_lab.method import Method, parse_all
from temper_lab.recipe import Recipe
from temper_lab.study import vary as varying
from temper_lab.study.vary import Axes, Settings
from temper_lab.train.run_dir import RunFolder

METHODS = ("residual", "mhc", "kromhc", "temper-cp", "temper-tucker")
LISTS = ("methods", "streams", "seeds")
AXES = (*LISTS, "vary")
# Every run is planned, counted and listed before the first one starts.
MAX_RUNS = 10_000


@dataclass(frozen=True)
class GridBlock:
    """Every method with every number of streams, every seed and every combination of varied fields."""

    methods: tuple[Method, ...]
    streams: tuple[int, ...]
    seeds: tuple[int, ...]
    vary: Axes = ()

    def __post_init__(self) -> None:
        for name, least in (("streams", 2), ("seeds", 0)):
            values = getattr(self, name)
            wrong = [v for v in values if not is_int(v) or v < least]
            if wrong or not values:
                given = repr(wrong[0]) if wrong else "nothing"
                note = " (residual has one stream, whatever N is)" if name == "streams" else ""
                raise ValueError(f"{name} has {given}; expected whole numbers >= {least}{note}")
            object.__setattr__(self, name, tuple(dict.fromkeys(values)))
        axes = (self.methods, self.streams, self.seeds, *(values for _, values in self.vary))
        if (num_runs := math.prod(map(len, axes))) > MAX_RUNS:
            raise ValueError(f"the grid has {num_runs:,} runs; expected at most {MAX_RUNS:,}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], otherwise: GridBlock) -> GridBlock:
        """Reads a table of a recipe; an axis that it lacks is taken from another block."""
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


Grid = tuple[GridBlock, ...]


def read_grid(values: Mapping[str, Any], recipe: Recipe, source: str) -> Grid:
    """Reads the grid of a section [compare]; by default streams and seed are the recipe's and methods the main ones."""
    streams = recipe.model.num_streams
    otherwise = GridBlock(parse_all(METHODS), (streams if streams > 1 else 4,), (recipe.train.seed,))
    try:
        for key in values:
            if key not in (*AXES, "grid", "claims"):
                raise unknown("option of [compare]", key, (*AXES, "grid", "claims"))
        blocks = values.get("grid", [{}])
        if not isinstance(blocks, list) or not blocks or not all(isinstance(block, Mapping) for block in blocks):
            raise ValueError(f"grid is {brief(blocks)}; expected a list of tables with {', '.join(AXES)}")
        for key in (key for block in blocks for key in block if key not in AXES):
            raise unknown("option of a table of grid", key, AXES)
        shared = GridBlock.from_dict(values, otherwise)
        return tuple(GridBlock.from_dict(block, shared) for block in blocks)
    except ValueError as error:
        raise ValueError(f"{source}: [compare] {error}") from error


@dataclass(frozen=True)
class Cell:
    """One run of a study.

    Args:
        num_streams: the true N, which is 1 for a residual network.
        vary: the fields in which its recipe differs from that of the study.
    """

    method: Method
    num_streams: int
    seed: int
    vary: Settings = ()

    @property
    def key(self) -> str:
        return f"{self.method.label}-n{self.num_streams}-s{self.seed}{varying.suffix(self.vary)}"

    @property
    def group(self) -> tuple[Method, int, Settings]:
        """The key that all seeds of a mean share."""
        return self.method, self.num_streams, self.vary

    def __str__(self) -> str:
        settings = f" with {varying.describe(self.vary)}" if self.vary else ""
        return f"{self.method}, N={self.num_streams}, seed {self.seed}{settings}"


def override(
    grid: Grid, methods: Sequence[str], streams: Sequence[int], seeds: Sequence[int], vary: Sequence[str] = ()
) -> Grid:
    """The grid with some axes replaced in every block; empty ones are ignored."""
    given: dict[str, tuple[Any, ...]] = {"streams": tuple(streams), "seeds": tuple(seeds)}
    given |= {"methods": parse_all(methods) if methods else (), "vary": varying.parse(vary)}
    changes = {axis: values for axis, values in given.items() if values}
    return tuple(dict.fromkeys(replace(block, **changes) for block in grid))


def run_folder(folder: Path, cell: Cell) -> RunFolder:
    return RunFolder(folder / "runs" / cell.key)
