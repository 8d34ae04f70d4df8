"""Tables on the command line: JSON, as in `--model.router '{"rank": 8}'`."""

from __future__ import annotations

import collections.abc
import json
from collections.abc import Mapping
from typing import Any

import tyro

from temper_lab.io import brief, parse_json


def registry() -> tyro.constructors.ConstructorRegistry:
    """What tyro has to know of options that are tables."""
    known = tyro.constructors.ConstructorRegistry()

    @known.primitive_rule
    def table(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
        if info.type_origin is not collections.abc.Mapping:
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="JSON",
            instance_from_str=lambda words: _table(words[0]),
            is_instance=lambda value: isinstance(value, Mapping),
            str_from_instance=lambda value: [json.dumps(value)],
        )

    return known


def _table(text: str) -> dict[str, Any]:
    value = parse_json(text, brief(text))
    if not isinstance(value, dict):
        raise ValueError(f"{brief(text)} is not a table; expected JSON such as '{{\"rank\": 8}}'")
    return value
