"""Parameters by counting, at the study's size and at the paper's, and the paper's own numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import temper


@cache
def paper() -> dict[str, Any]:
    """The paper's table 1, with the size of its model."""
    return json.loads((files("temper_lab.report") / "paper.json").read_text(encoding="utf-8"))


def paper_row(label: str, streams: int) -> dict[str, Any]:
    """What the paper reports of a method at N; empty if it does not."""
    return paper()["table"].get(str(streams), {}).get(label, {})


def added(preset: str, options: Mapping[str, Any], streams: int, dim: int, sites: int) -> int | None:
    """Trainable routing parameters of a model, or None for options that do not fit this size."""
    try:
        return sites * temper.count_parameters(temper.preset(preset, num_streams=streams, dim=dim, **options))
    except (ValueError, TypeError):
        return None


def option(preset: str, options: Mapping[str, Any], name: str, streams: int, dim: int) -> Any:
    """The value that an option of a method has, given or by default; None if it has none of that name."""
    if name in options:
        return options[name]
    try:
        config = temper.preset(preset, num_streams=streams, dim=dim, **options)
    except (ValueError, TypeError):
        return None
    parts = (config.res, config.pre, config.post, config.mixer)
    return next((part.options[name] for part in parts if part is not None and name in part.options), None)
