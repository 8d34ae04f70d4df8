"""The results of a study as the report needs them: which runs are compared with which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from temper_lab.study import vary
from temper_lab.study.results import Results, Run
from temper_lab.study.vary import Settings


@dataclass(frozen=True)
class StudyView:
    """The content of results.json, with quantities derived from it.

    Args:
        runs: all of them.
        settings: the varied fields of the runs that are looked at, and numbers are taken from; all others are left
            aside. `under` looks at other ones.
    """

    results: Results
    runs: tuple[Run, ...]
    settings: Settings = ()

    @classmethod
    def of(cls, results: Results) -> StudyView:
        order = {method: place for place, method in reversed(list(enumerate(results.methods)))}
        # Sorted in the requested order; the sort is stable, so the rest keeps its order.
        view = cls(results, tuple(sorted(results.runs, key=lambda run: order.get(run.method, len(order)))))
        return view.under(view._usual())

    @property
    def name(self) -> str:
        return self.results.study or "study"

    @cached_property
    def labels(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(run.method for run in self.runs))

    @cached_property
    def preset_of(self) -> dict[str, str]:
        return {run.method: run.preset for run in self.runs}

    @cached_property
    def streams(self) -> tuple[int, ...]:
        """Every N of the study. Residual runs have one stream and count at each of them."""
        found = {run.streams for run in self.runs if not run.is_residual}
        return tuple(sorted(found or {*self.results.streams} or {1}))

    @cached_property
    def baseline(self) -> str | None:
        """The label of the residual runs."""
        return next((run.method for run in self.runs if run.is_residual), None)

    @cached_property
    def fields(self) -> tuple[str, ...]:
        """The fields of the recipe that are varied."""
        asked = list(self.results.vary)
        found = {name: None for run in self.runs for name in run.vary}
        return tuple(sorted(found, key=lambda name: asked.index(name) if name in asked else len(asked)))

    def values(self, settings: Settings, *, is_residual: bool = False) -> dict[str, Any]:
        """The value of every varied field; None for one that a residual run does not depend on. Lists are texts."""
        found = {
            name: vary.value_in(self.results.recipe, dict(settings), name, is_residual=is_residual)
            for name in self.fields
        }
        return {
            name: value if value is None or isinstance(value, str | int | float) else vary.show(value)
            for name, value in found.items()
        }

    @cached_property
    def here(self) -> dict[str, Any]:
        """The value of every varied field in the runs in view."""
        return self.values(self.settings)

    @property
    def words(self) -> str:
        """The settings in view, in words."""
        return words(self.here)

    @property
    def suffix(self) -> str:
        """The settings in view as the end of a title; empty for a study without varied fields."""
        return f", {self.words}" if self.fields else ""

    def holds(self, row: Mapping[str, Any]) -> bool:
        """True if a row belongs to the runs in view."""
        return all(row[name] == value for name, value in self.here.items())

    def under(self, settings: Settings) -> StudyView:
        """The same study, looking at the runs with other settings."""
        return replace(self, settings=settings)

    @cached_property
    def variants(self) -> tuple[StudyView, ...]:
        """The study with each of the settings that runs have."""
        found = dict.fromkeys(run.settings for run in self.runs if not run.is_residual)
        seen = {vary.of_residual(settings) for settings in found}
        found |= dict.fromkeys(run.settings for run in self.runs if run.is_residual and run.settings not in seen)
        values = {settings: self.values(settings) for settings in found}
        ranks = {name: vary.ordered(each[name] for each in values.values()) for name in self.fields}
        places = {one: [ranks[name].index(value) for name, value in values[one].items()] for one in found}
        return tuple(self.under(settings) for settings in sorted(found, key=places.__getitem__))

    def _usual(self) -> Settings:
        """The recipe's own settings if something finished with them, or else those with the most finished runs."""

        def finished(variant: StudyView) -> tuple[bool, int]:
            runs = [run for n in variant.streams for label in variant.labels for run in variant.measured(label, n)]
            return bool(runs) and not variant.settings, len(runs)

        return max(self.variants, key=finished, default=self).settings

    def at(self, label: str, num_streams: int) -> tuple[Run, ...]:
        """All runs of a method at N with the settings that are looked at, whatever became of them."""
        others = [run for run in self.runs if run.settings == self.settings and not run.is_residual]
        # Only the seeds that the other methods have, so that means are comparable.
        seeds = {run.seed for run in others if run.streams == num_streams}
        residual = vary.of_residual(self.settings)

        def is_here(run: Run) -> bool:
            if not run.is_residual:
                return run.streams == num_streams and run.settings == self.settings
            return run.settings == residual and (run.seed in seeds if others else num_streams == self.streams[0])

        return tuple(run for run in self.runs if run.method == label and is_here(run))

    def measured(self, label: str, num_streams: int) -> dict[int, Run]:
        """The runs of a method that finished with a bpb, by seed."""
        return {run.seed: run for run in self.at(label, num_streams) if run.is_finished and run.bpb is not None}

    def labels_at(self, num_streams: int) -> tuple[str, ...]:
        return tuple(label for label in self.labels if self.at(label, num_streams))

    @cached_property
    def size(self) -> tuple[int, int] | None:
        """Width D and the number of sites, or None if the recipe does not say."""
        from temper_lab.model.config import ModelConfig

        model = dict(self.section("model"))
        # The routing of the recipe is left out: it is not needed for the size, and may have options of a newer version.
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
        fields = self.results.recipe.get(name)
        return {**(fields if isinstance(fields, Mapping) else {}), **varied}


def words(values: Mapping[str, Any]) -> str:
    """Fields with their values: `depth = 4, matrix_lr = 0.05`."""
    return ", ".join(f"{vary.short(name)} = {vary.show(value)}" for name, value in values.items())
