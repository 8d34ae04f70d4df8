"""results.json, read and checked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from temper_lab.compare import vary
from temper_lab.compare.vary import Settings
from temper_lab.io import brief, read_json

FILE_NAME = "results.json"
FORMAT = "temper-results-1"
RESIDUAL = "residual"
# Larger numbers are none: their squares are infinite.
LARGEST, LARGEST_COUNT = 1e100, 1 << 63
# What else is in a results.json, as far as the report uses it.
SHAPES = {"cost": Mapping, "versions": Mapping, "machine": Mapping, "recipe": Mapping}
SHAPES |= {"methods": list, "streams": list, "seeds": list}
ROUTING = ("res_off_diagonal", "composite_gain", "stream_similarity")

Curve = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Run:
    """One entry of `runs`. A number that is missing or not finite is None; such points of a curve are left out."""

    key: str
    method: str
    preset: str
    label: str
    options: Mapping[str, Any]
    streams: int
    seed: int
    status: str
    reason: str | None
    added: int | None
    frozen: int | None
    total: int | None
    step: int | None
    steps: int | None
    train: Curve
    val: Curve
    # By the name that metrics.jsonl has for it; empty curves for runs that do not have it.
    routing: Mapping[str, Curve]
    train_loss: float | None
    val_loss: float | None
    bpb: float | None
    core: float | None
    core_tasks: Mapping[str, float]
    core_errors: Mapping[str, float]
    step_seconds: float | None
    vary: Settings = ()

    @property
    def is_residual(self) -> bool:
        return self.preset == RESIDUAL

    @property
    def is_finished(self) -> bool:
        return self.status == "finished"

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> Run:
        if missing := [key for key in ("key", "preset", "label", "streams", "seed", "status") if key not in entry]:
            raise ValueError(f"a run lacks {', '.join(missing)}")
        parameters, final = _mapping(entry, "parameters"), _mapping(entry, "final")
        core, timing = _mapping(entry, "core"), _mapping(entry, "timing")
        return cls(
            key=str(entry["key"]),
            method=str(entry.get("method", entry["label"])),
            preset=str(entry["preset"]),
            label=str(entry["label"]),
            options=_mapping(entry, "options"),
            streams=_whole(entry, "streams"),
            seed=_whole(entry, "seed"),
            status=str(entry["status"]),
            reason=None if entry.get("reason") is None else str(entry["reason"]),
            **{name: _count(parameters.get(name)) for name in ("added", "frozen", "total")},
            **{name: _count(entry.get(name)) for name in ("step", "steps")},
            train=_curve(_mapping(entry, "train"), "loss"),
            val=_curve(_mapping(entry, "val"), "bpb"),
            routing={name: _curve(_mapping(entry, "routing"), name) for name in ROUTING if "routing" in entry},
            **{name: number(final.get(name)) for name in ("train_loss", "val_loss", "bpb")},
            core=number(core.get("CORE")),
            core_tasks=_tasks(_mapping(core, "tasks")),
            core_errors=_errors(_mapping(core, "tasks")),
            step_seconds=number(timing.get("step_seconds")),
            vary=_settings(entry),
        )


@dataclass(frozen=True)
class Study:
    """What results.json holds, with what follows from it.

    Args:
        runs: all of them.
        settings: the varied fields of the runs that are looked at, and numbers are taken from; all others are left
            aside. `under` looks at other ones.
    """

    raw: Mapping[str, Any]
    runs: tuple[Run, ...]
    settings: Settings = ()

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Study:
        """Raises ValueError for anything that is not the content of a results.json."""
        if raw.get("format") != FORMAT:
            raise ValueError(f"the results have format {raw.get('format')!r}, expected {FORMAT!r}")
        for name, kind in SHAPES.items():
            if not isinstance(raw.get(name), kind | None):
                raise ValueError(f"the results have {brief(raw[name])} as {name!r}")
        for name in ("rows", "setting"):
            part = _mapping(raw, "cost").get(name)
            parts = part if name == "rows" and isinstance(part, list) else [part]
            if not all(isinstance(part, Mapping | None) for part in parts):
                raise ValueError(f"the results have {brief(part)} as {name!r} of the cost")
        entries = raw.get("runs")
        if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
            raise ValueError("the results have no list of runs")
        runs = []
        for place, entry in enumerate(entries):
            try:
                runs.append(Run.of(entry))
            except (ValueError, TypeError) as error:
                raise ValueError(
                    f"run {place} ({entry.get('key', 'without a key')}) in the results: {error}"
                ) from error
        keys = [run.key for run in runs]
        if twice := sorted({key for key in keys if keys.count(key) > 1}):
            raise ValueError(f"the results have several runs with the key {', '.join(twice)}")
        asked = [str(method) for method in raw.get("methods") or []]
        order = {method: place for place, method in reversed(list(enumerate(asked)))}
        # In the order that was asked for; sorting is stable, so the rest stays as it was.
        study = cls(raw, tuple(sorted(runs, key=lambda run: order.get(run.method, len(order)))))
        return study.under(study._usual())

    @property
    def name(self) -> str:
        return str(self.raw.get("study") or "study")

    @cached_property
    def labels(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(run.label for run in self.runs))

    @cached_property
    def preset_of(self) -> dict[str, str]:
        return {run.label: run.preset for run in self.runs}

    @cached_property
    def streams(self) -> tuple[int, ...]:
        """Every N of the study. Residual runs have one stream and count at each of them."""
        found = {run.streams for run in self.runs if not run.is_residual}
        asked = {n for n in self.raw.get("streams") or [] if isinstance(n, int)}
        return tuple(sorted(found or asked or {1}))

    @cached_property
    def baseline(self) -> str | None:
        """The label of the residual runs."""
        return next((run.label for run in self.runs if run.is_residual), None)

    @cached_property
    def fields(self) -> tuple[str, ...]:
        """The fields of the recipe that are varied."""
        asked = _mapping(self.raw, "vary")
        found = {name: None for run in self.runs for name, _ in run.vary}
        return tuple(sorted(found, key=lambda name: list(asked).index(name) if name in asked else len(asked)))

    def values(self, settings: Settings, *, is_residual: bool = False) -> dict[str, Any]:
        """The value of every varied field; None for one that a residual run does not depend on. Lists are texts."""
        recipe = _mapping(self.raw, "recipe")
        found = {name: vary.value_in(recipe, dict(settings), name, is_residual=is_residual) for name in self.fields}
        return {
            name: value if value is None or isinstance(value, str | int | float) else vary.show(value)
            for name, value in found.items()
        }

    @cached_property
    def here(self) -> dict[str, Any]:
        """The value of every varied field in the runs that are looked at."""
        return self.values(self.settings)

    @property
    def words(self) -> str:
        """The settings that are looked at, for people."""
        return words(self.here)

    @property
    def suffix(self) -> str:
        """The same at the end of a title; empty for a study that varies nothing."""
        return f", {self.words}" if self.fields else ""

    def holds(self, row: Mapping[str, Any]) -> bool:
        """Whether a row of a table is of the runs that are looked at."""
        return all(row[name] == value for name, value in self.here.items())

    def under(self, settings: Settings) -> Study:
        """The same study, looking at the runs with other settings."""
        return replace(self, settings=settings)

    @cached_property
    def variants(self) -> tuple[Study, ...]:
        """The study with each of the settings that runs have."""
        found = dict.fromkeys(run.vary for run in self.runs if not run.is_residual)
        seen = {vary.of_residual(settings) for settings in found}
        found |= dict.fromkeys(run.vary for run in self.runs if run.is_residual and run.vary not in seen)
        values = {settings: self.values(settings) for settings in found}
        ranks = {name: vary.ordered(each[name] for each in values.values()) for name in self.fields}
        places = {one: [ranks[name].index(value) for name, value in values[one].items()] for one in found}
        return tuple(self.under(settings) for settings in sorted(found, key=places.__getitem__))

    def _usual(self) -> Settings:
        """The recipe's own settings if something finished with them, or else those with the most finished runs."""

        def finished(variant: Study) -> tuple[bool, int]:
            runs = [run for n in variant.streams for label in variant.labels for run in variant.measured(label, n)]
            return bool(runs) and not variant.settings, len(runs)

        return max(self.variants, key=finished, default=self).settings

    def at(self, label: str, streams: int) -> tuple[Run, ...]:
        """All runs of a method at N with the settings that are looked at, whatever became of them."""
        others = [run for run in self.runs if run.vary == self.settings and not run.is_residual]
        # A mean over more seeds than the others have is not a mean to stand beside theirs.
        seeds = {run.seed for run in others if run.streams == streams}
        residual = vary.of_residual(self.settings)

        def is_here(run: Run) -> bool:
            if not run.is_residual:
                return run.streams == streams and run.vary == self.settings
            return run.vary == residual and (run.seed in seeds if others else streams == self.streams[0])

        return tuple(run for run in self.runs if run.label == label and is_here(run))

    def measured(self, label: str, streams: int) -> dict[int, Run]:
        """By seed, the runs of a method that finished with a bpb."""
        return {run.seed: run for run in self.at(label, streams) if run.is_finished and run.bpb is not None}

    def labels_at(self, streams: int) -> tuple[str, ...]:
        return tuple(label for label in self.labels if self.at(label, streams))

    @cached_property
    def size(self) -> tuple[int, int] | None:
        """Width D and the number of sites, or None if the recipe does not say."""
        from temper_lab.model.config import ModelConfig

        model = dict(self.section("model"))
        # The routing of the base is one of many, and its options may be those of a newer version.
        for key in ("preset", "num_streams", "router"):
            model.pop(key, None)
        try:
            config = ModelConfig.from_dict(model)
        except (ValueError, TypeError):
            return None
        return config.dim, 2 * config.num_layers

    def section(self, name: str) -> Mapping[str, Any]:
        """A section of the recipe with the settings that are looked at, empty if it is not there."""
        start = f"{name}."
        varied = {field.removeprefix(start): value for field, value in self.settings if field.startswith(start)}
        return {**_mapping(_mapping(self.raw, "recipe"), name), **varied}


def read(path: Path) -> dict[str, Any]:
    """The content of a study's results.json, given its folder or the file itself."""
    file = path / FILE_NAME if path.is_dir() else path
    if not path.exists():
        raise ValueError(
            f"there is no {path}; expected the folder of a study (`temper compare --out {path}` makes one)"
        )
    if not file.is_file():
        raise ValueError(f"there is no {FILE_NAME} in {path}; `temper compare --out {path}` writes it")
    raw = read_json(file, allow_nan=True)
    try:
        Study.of(raw)
    except ValueError as error:
        raise ValueError(f"{file} is not a study: {error}") from error
    return raw


def words(values: Mapping[str, Any]) -> str:
    """Fields with their values: `depth = 4, matrix_lr = 0.05`."""
    return ", ".join(f"{vary.short(name)} = {vary.show(value)}" for name, value in values.items())


def number(value: Any) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -LARGEST < value < LARGEST:
        return None
    return float(value)


def _whole(entry: Mapping[str, Any], name: str) -> int:
    value = entry[name]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < LARGEST_COUNT:
        raise ValueError(f"{name} is {brief(value)}; expected a whole number")
    return value


def _count(value: Any) -> int | None:
    return None if number(value) is None else int(value)


def _mapping(entry: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = entry.get(name)
    return value if isinstance(value, Mapping) else {}


def _settings(entry: Mapping[str, Any]) -> Settings:
    """What is varied in a run; nothing in results of an older version."""
    found = entry.get("vary") or {}
    if not isinstance(found, Mapping) or any(isinstance(value, Mapping) for value in found.values()):
        raise ValueError(f"vary is {found!r}; expected fields with their values")
    return vary.frozen({str(name): found[name] for name in sorted(found)})


def _curve(columns: Mapping[str, Any], name: str) -> Curve:
    steps, values = columns.get("step") or [], columns.get(name) or []
    if not isinstance(steps, Sequence) or not isinstance(values, Sequence) or len(steps) != len(values):
        raise ValueError(f"the curve of {name} has another number of steps than of values")
    points = ((number(step), number(value)) for step, value in zip(steps, values, strict=True))
    return tuple((int(step), value) for step, value in points if step is not None and value is not None)


def _tasks(tasks: Mapping[str, Any]) -> dict[str, float]:
    """The centered accuracy by task, which may be a number or an entry of a larger result."""
    found = {}
    for label, value in tasks.items():
        centered = number(value.get("centered") if isinstance(value, Mapping) else value)
        if centered is not None:
            found[str(label)] = centered
    return found


def _errors(tasks: Mapping[str, Any]) -> dict[str, float]:
    """The standard error of the centered accuracy by task, where accuracy, baseline and items are known."""
    found = {}
    for label in tasks:
        entry = _mapping(tasks, label)
        accuracy, baseline, items = (number(entry.get(name)) for name in ("accuracy", "baseline", "items"))
        if accuracy is None or baseline is None or items is None:
            continue
        if 0 <= accuracy <= 1 and 0 <= baseline < 1 and items > 1:
            found[str(label)] = math.sqrt(accuracy * (1 - accuracy) / (items - 1)) / (1 - baseline)
    return found
