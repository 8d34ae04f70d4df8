"""results.json, read and checked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from temper_lab.checkpoint.files import read_json

FILE_NAME = "results.json"
FORMAT = "temper-results-1"
RESIDUAL = "residual"
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
    step_seconds: float | None

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
            step_seconds=number(timing.get("step_seconds")),
        )


@dataclass(frozen=True)
class Study:
    """What results.json holds, with what follows from it."""

    raw: Mapping[str, Any]
    runs: tuple[Run, ...]

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Study:
        """Raises ValueError for anything that is not the content of a results.json."""
        if raw.get("format") != FORMAT:
            raise ValueError(f"the results have format {raw.get('format')!r}, expected {FORMAT!r}")
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
        return cls(raw, tuple(sorted(runs, key=lambda run: order.get(run.method, len(order)))))

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

    def at(self, label: str, streams: int) -> tuple[Run, ...]:
        """All runs of a method at N, whatever became of them."""
        # A mean over more seeds than the others have is not a mean to stand beside theirs.
        seeds = {run.seed for run in self.runs if run.streams == streams and not run.is_residual}
        return tuple(
            run
            for run in self.runs
            if run.label == label and (run.streams == streams or (run.is_residual and (run.seed in seeds or not seeds)))
        )

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
        """A section of the recipe, empty if it is not there."""
        return _mapping(_mapping(self.raw, "recipe"), name)


def read(path: Path) -> dict[str, Any]:
    """The content of a study's results.json, given its folder or the file itself."""
    file = path / FILE_NAME if path.is_dir() else path
    if not path.exists():
        raise ValueError(
            f"there is no {path}; expected the folder of a study (`temper compare --out {path}` makes one)"
        )
    if not file.is_file():
        raise ValueError(f"there is no {FILE_NAME} in {path}; `temper compare --out {path}` writes it")
    raw = read_json(file)
    try:
        Study.of(raw)
    except ValueError as error:
        raise ValueError(f"{file} is not a study: {error}") from error
    return raw


def number(value: Any) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _whole(entry: Mapping[str, Any], name: str) -> int:
    value = entry[name]
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} is {value!r}; expected a whole number")
    return value


def _count(value: Any) -> int | None:
    return None if number(value) is None else int(value)


def _mapping(entry: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = entry.get(name)
    return value if isinstance(value, Mapping) else {}


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
