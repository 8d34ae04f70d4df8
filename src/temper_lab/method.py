"""Methods and ranks as people write them: `mhc:generator=cp:mixer=kronecker:rank=2`, `res=cp+rank=8`, 2x12, 0.1."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import temper
from temper.config import option_defaults
from temper.generators.base import Rank
from temper.registry import unknown
from temper_lab.io import parse_json

# Characters that are also safe in a folder's name.
WORD = re.compile(r"[A-Za-z][\w.-]*")
RANKS = re.compile(r"\d+(x\d+)+")
JSON_WORDS = {"true": True, "false": False, "null": None}


@dataclass(frozen=True)
class Method:
    """A preset with router overrides: `temper-cp`, `temper-cp:rank=8`, `mhc:generator=tucker:res=cp+rank=8`.

    Args:
        items: the overrides, as text, by name and sorted.
    """

    preset: str
    items: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Method:
        """Parses a method, or raises ValueError. Whether options fit the preset depends on N, and is checked later."""
        name, items = _split(text, "method")
        if name not in temper.PRESETS:
            raise unknown("method", name, temper.PRESETS)
        return cls(name, tuple(sorted(items.items())))

    @classmethod
    def of(cls, preset: str, overrides: Mapping[str, Any]) -> Method:
        """The method of a preset and overrides as `temper.preset` takes them."""
        return cls(preset, tuple(sorted((option, _spelled(option, value)) for option, value in overrides.items())))

    def __str__(self) -> str:
        return ":".join([self.preset, *(f"{option}={value}" for option, value in self.items)])

    @property
    def label(self) -> str:
        """The method as part of a folder's name."""
        return "-".join([self.preset, *(f"{option}{value.replace('=', '')}" for option, value in self.items)])

    @property
    def options(self) -> dict[str, Any]:
        """The overrides as `temper.preset` takes them, in the form that JSON holds."""
        return {option: _value(text) for option, text in self.items}

    def config(self, num_streams: int, dim: int) -> temper.RouterConfig:
        """The configuration of a site."""
        return temper.preset(self.preset, num_streams=num_streams, dim=dim, **self.options)


def parse_all(texts: Iterable[str]) -> tuple[Method, ...]:
    """Parses methods separated by commas or given one by one, without duplicates."""
    words = [word.strip() for text in texts for word in text.split(",")]
    methods = tuple(dict.fromkeys(Method.parse(word) for word in words if word))
    if not methods:
        raise ValueError(f"no method is named; expected some of {', '.join(temper.PRESETS)}")
    return methods


def parse_generator(text: str) -> tuple[str, Rank]:
    """The name and the rank of a generator, `tucker:rank=2x12`; None for no rank."""
    name, items = _split(text, "generator")
    forms = sorted(key for key, form in temper.Generator.members.items() if form.ranked)
    if name not in forms:
        raise unknown("low-rank generator", name, forms)
    if others := [option for option in items if option != "rank"]:
        raise ValueError(f"generator {text!r} has {others[0]}; expected a rank and nothing else, such as {name}:rank=8")
    return name, parse_rank(items["rank"]) if "rank" in items else None


def parse_rank(text: str) -> Rank:
    """The rank of a text, or a ValueError."""
    try:
        value = _value(text.lower())
    except ValueError:
        value = None
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"the rank is {text!r}; expected a number like 8, numbers like 2x12, or a fraction like 0.1")
    return value


def show_rank(rank: Any) -> str:
    """The text of a rank; lists are what JSON makes of tuples."""
    return "x".join(map(str, rank)) if isinstance(rank, list | tuple) else str(rank)


def _split(text: str, kind: str) -> tuple[str, dict[str, str]]:
    """Splits a text into its leading name and the options after it, in canonical form."""
    name, *parts = text.split(":")
    items: dict[str, str] = {}
    for part in parts:
        option, sign, value = part.partition("=")
        if not (sign and WORD.fullmatch(option)):
            raise ValueError(f"{kind} {text!r}: {part!r} is not an override; expected OPTION=VALUE, such as rank=8")
        if option in items:
            raise ValueError(f"{kind} {text!r} has {option} twice")
        items[option] = _tidy(f"{kind} {text!r}", option, value)
    return name, items


def _value(text: str) -> Any:
    """A value as JSON holds it: a number, a list of numbers, a name, or a name with options."""
    if RANKS.fullmatch(text):
        return [int(part) for part in text.split("x")]
    if text in JSON_WORDS:
        return JSON_WORDS[text]
    name, *parts = text.split("+")
    if WORD.fullmatch(name):
        if not parts:
            return name
        pairs = [part.partition("=") for part in parts]
        if not all(sign and WORD.fullmatch(option) for option, sign, _ in pairs):
            raise ValueError(f"{text!r} is not a name with options")
        return {"name": name, **{option: _value(value) for option, _, value in pairs}}
    return parse_json(f"0{text}" if text.startswith(".") else text, "the value")


def _tidy(where: str, option: str, text: str) -> str:
    """The canonical form of a value."""
    try:
        value = _value(text)
        is_known = value is None or isinstance(value, str | bool | int | float | list | dict)
    except ValueError:
        is_known = False
    if not is_known or text.startswith(("[", "{", '"')):
        raise ValueError(f"{where}: {text!r} is not a value; expected 8, 0.1, 2x12, true, false, a name or cp+rank=8")
    return _spelled(option, value)


def _spelled(option: str, value: Any) -> str:
    """The text of a value, without the options of a part that are at their defaults."""
    if isinstance(value, temper.Choice):
        value = {"name": value.name, **value.options}
    if isinstance(value, Mapping):
        family = temper.Mixer if option == "mixer" else temper.Generator
        known = option_defaults(family.members[value["name"]]) if value["name"] in family.members else {}
        rest = {key: part for key, part in sorted(value.items()) if key != "name"}
        told = {key: part for key, part in rest.items() if key not in known or part != known[key]}
        return "+".join([value["name"], *(f"{key}={_spelled('', part)}" for key, part in told.items())])
    if isinstance(value, list | tuple):
        return show_rank(value)
    return value if isinstance(value, str) else json.dumps(value)
