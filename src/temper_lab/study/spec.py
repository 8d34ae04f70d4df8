"""A study, stored in `study.json`: a recipe, and a grid of methods, streams, seeds and fields."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import temper
from temper.mixers import Mixer
from temper.registry import unknown
from temper_lab import plugins
from temper_lab.data import DataFingerprint
from temper_lab.io import FileError, atomic_write, brief, dumps, entry, read_json
from temper_lab.method import Method
from temper_lab.model import ModelConfig
from temper_lab.recipe import Recipe, field_types
from temper_lab.study import vary as varying
from temper_lab.study.claims import ROUTING, STREAMS, Claim, Record, joined, read_claims
from temper_lab.study.grid import Cell, Grid, GridBlock, read_grid, run_folder
from temper_lab.study.vary import Axes, Settings

FORMAT = "temper-study-1"
FILE_NAME = "study.json"


@dataclass(frozen=True)
class Study:
    """A recipe and the grid of its runs.

    Args:
        name: the name of the recipe.
        recipe: the recipe that all runs share, apart from preset, streams, router, seed and varied fields.
        commands: the commands that made and extended this study.
        claims: the claims to test.
        data: the data of all runs; None until the first of them, or if it is from before they were recorded.
    """

    name: str
    recipe: Recipe
    grid: Grid
    commands: tuple[str, ...] = ()
    claims: tuple[Claim, ...] = ()
    data: DataFingerprint | None = None

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

        Block after block of the grid, and within a block seed by seed, so that the runs that have finished when time
        runs out have all methods of the same seeds.
        """
        return tuple(dict.fromkeys(cell for block in self.grid for cell in self._cells(block)))

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """Every run once, in the order of tables: by method in the requested order, streams, varied fields and seed."""
        methods = {method: index for index, method in enumerate(self.methods)}
        ranks = {name: {value: rank for rank, value in enumerate(values)} for name, values in self.axes}

        def place(cell: Cell) -> tuple[Any, ...]:
            values = ((ranks[name], self.value_of(cell, name)) for name in ranks)
            return methods[cell.method], cell.num_streams, *(rank.get(value, -1) for rank, value in values), cell.seed

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

    def _cells(self, block: GridBlock) -> Iterator[Cell]:
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
        """The recipe with the varied fields of a run, before its method and seed are set."""
        return varying.varied(self.recipe, cell.vary)

    def recipe_of(self, cell: Cell, folder: Path, threads: int | None = None) -> Recipe:
        """The recipe of a run in the study's folder."""
        recipe = self.settings_of(cell)
        model = _model(recipe.model, cell.method, cell.num_streams)
        train = replace(recipe.train, seed=cell.seed, threads=recipe.train.threads if threads is None else threads)
        tokenizer = replace(recipe.tokenizer, path=str(folder / "tokenizer"))
        return replace(recipe, model=model, train=train, tokenizer=tokenizer)

    def routing(self, cell: Cell) -> temper.RouterConfig:
        return _model(self.settings_of(cell).model, cell.method, cell.num_streams).routing()

    def refusal(self, cell: Cell) -> str | None:
        """The reason why a run is skipped, or None."""
        config = self.routing(cell)
        reason = None if config.mixer is None else Mixer.named(config.mixer.name).refusal(config.num_streams)
        if reason is None:
            return None
        count, sites = temper.count_parameters(config), self.settings_of(cell).model.num_sites
        return f"{reason} Here it would take {count:,} parameters per site, {sites * count:,} in {sites} sites."

    def extended(self, grid: Grid, command: str, claims: Sequence[Claim] = ()) -> Study:
        """The study with the runs of another grid and more claims; the same study if it has them all."""
        larger = replace(self, grid=(*self.grid, *grid), claims=joined(self.claims, claims))
        if set(larger.queue) == set(self.queue) and larger.claims == self.claims:
            return self
        return replace(larger, commands=(*self.commands, command))

    def recorded(self, folder: Path, known: Collection[str] = ()) -> Study:
        """The study with its new claims dated, each with the number of runs that were there before it.

        Args:
            known: keys of runs that were finished elsewhere.
        """
        if all(claim.record for claim in self.claims):
            return self
        started = {cell.key: run for cell in self.cells if (run := run_folder(folder, cell)).is_run}
        finished = {key for key, run in started.items() if run.read().get("status") == "finished"} | {*known}
        record = Record(datetime.now(UTC).date().isoformat(), len({*started, *known}), len(finished))
        return replace(self, claims=tuple(replace(claim, record=claim.record or record) for claim in self.claims))

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "name": self.name,
            "commands": [*self.commands],
            "grid": [block.to_dict() for block in self.grid],
            "claims": [claim.to_dict() for claim in self.claims],
            "data": self.data.to_dict() if self.data else None,
            "recipe": self.recipe.to_dict(),
            "imports": plugins.modules_of([method.options for method in self.methods]),
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
        # Studies of earlier versions have no claims and do not record their data.
        claims = read_claims(content.get("claims", []))
        try:
            data = DataFingerprint.from_dict(content["data"]) if content.get("data") else None
        except ValueError as error:
            raise FileError(f"{path}: {error}") from error
        with plugins.recorded(content.get("imports")):
            return cls(entry(content, "name", str, path), recipe, grid, tuple(commands), claims, data)


@cache
def _model(model: ModelConfig, method: Method, num_streams: int) -> ModelConfig:
    return model.with_(preset=method.preset, num_streams=num_streams, router=method.options)


def claims_of(values: Mapping[str, Any], recipe: Recipe, source: str) -> tuple[Claim, ...]:
    """The claims of a section [compare], with the seeds that its grid plans for them; raises ValueError."""
    if "claims" not in values:
        return ()
    study = Study("", recipe, read_grid(values, recipe, source))
    try:
        claims = read_claims(values["claims"])
        if known := [claim.name for claim in claims if claim.record or claim.planned]:
            raise ValueError(
                f"claim {known[0]} has a record or planned seeds; expected none in a recipe: the study keeps them"
            )
        return tuple(_checked(claim, study) for claim in claims)
    except ValueError as error:
        raise ValueError(f"{source}: [compare] {error}") from error


def _checked(claim: Claim, study: Study) -> Claim:
    """The claim with its methods in their one spelling and its seeds; ValueError if the grid lacks a run of it."""
    fields = {
        f"{section}.{key}": value for section, part in study.recipe.to_dict().items() for key, value in part.items()
    }

    def differing(settings: Iterable[tuple[str, Any]], method: Method) -> dict[str, Any]:
        """The settings that differ from the recipe and that a method depends on."""
        ignored = ROUTING if method.preset == "residual" else ()
        return {name: value for name, value in settings if fields.get(name) != value and name not in ignored}

    def find(text: str, num_streams: int, settings: Mapping[str, Any]) -> dict[int, float]:
        method = Method.parse(text)
        cells = [cell for cell in study.cells if cell.method == method]
        if not cells:
            raise _missing(text, study.methods)
        at = [cell for cell in cells if cell.num_streams == num_streams or method.preset == "residual"]
        if not at:
            raise _missing(f"{text} at N = {num_streams}", sorted({cell.num_streams for cell in cells}))
        wanted = differing(settings.items(), method)
        seeds = [cell.seed for cell in at if differing(_vary(cell), method) == wanted]
        if not seeds:
            raise _missing(f"{text} with {_words(settings.items())}", sorted({_words(_vary(cell)) for cell in at}))
        return dict.fromkeys(seeds, 0.0)

    try:
        if claim.along not in ("", STREAMS, *fields):
            raise unknown("axis", claim.along, {STREAMS, *fields})
        spelled: dict[str, Any] = {"methods": [str(Method.parse(text)) for text in claim.methods]}
        if claim.against:
            spelled["against"] = str(Method.parse(claim.against))
        # The test itself is run on the grid to find the runs that it needs, and the seeds that have them all.
        planned = [sorted(sample.by_seed) for sample in claim.rule.samples(claim, find)]
    except ValueError as error:
        raise ValueError(f"claim {claim.name}: {error}") from error
    return Claim.from_dict({**claim.to_dict(), **spelled, "planned": planned})


def _missing(what: str, known: Collection[Any]) -> ValueError:
    return ValueError(f"the grid has no {what}; expected some of {', '.join(map(str, known))}")


def _words(settings: Iterable[tuple[str, Any]]) -> str:
    return " and ".join(f"{name} = {value}" for name, value in settings) or "the recipe as it is"


def _vary(cell: Cell) -> tuple[tuple[str, Any], ...]:
    """The varied fields of a run, with their values."""
    return cell.vary
