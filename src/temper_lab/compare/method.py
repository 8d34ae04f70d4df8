"""A method as people write it: a preset, and what is changed in it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import temper
from temper.registry import unknown
from temper_lab.io import parse_json
from temper_lab.ranks import show_rank

# What may stand in the name of a folder as well.
WORD = re.compile(r"[A-Za-z][\w.-]*")
RANKS = re.compile(r"\d+(x\d+)+")


@dataclass(frozen=True)
class Method:
    """A preset with router overrides: `temper-cp`, `temper-cp:rank=8`, `temper-tucker:rank=2x12:gain=none`.

    Args:
        items: the overrides, as text, by name and sorted.
    """

    preset: str
    items: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Method:
        """The method of a text, or a ValueError. Whether an option fits the preset depends on N and is seen later."""
        name, *parts = text.split(":")
        if name not in temper.PRESETS:
            raise unknown("method", name, temper.PRESETS)
        items = {}
        for part in parts:
            option, sign, value = part.partition("=")
            if not (sign and WORD.fullmatch(option)):
                raise ValueError(f"method {text!r}: {part!r} is not an override; expected OPTION=VALUE, such as rank=8")
            if option in items:
                raise ValueError(f"method {text!r} has {option} twice")
            items[option] = _tidy(text, value)
        return cls(name, tuple(sorted(items.items())))

    def __str__(self) -> str:
        return ":".join([self.preset, *(f"{option}={value}" for option, value in self.items)])

    @property
    def label(self) -> str:
        """For names of folders."""
        return "-".join([self.preset, *(f"{option}{value}" for option, value in self.items)])

    @property
    def options(self) -> dict[str, Any]:
        """The overrides as `temper.preset` takes them, in the form that JSON holds."""
        return {option: _value(text) for option, text in self.items}


def parse_all(texts: Iterable[str]) -> tuple[Method, ...]:
    """Methods separated by commas, or one by one, each once."""
    words = [word.strip() for text in texts for word in text.split(",")]
    methods = tuple(dict.fromkeys(Method.parse(word) for word in words if word))
    if not methods:
        raise ValueError(f"no method is named; expected some of {', '.join(temper.PRESETS)}")
    return methods


def _value(text: str) -> Any:
    if RANKS.fullmatch(text):
        return [int(part) for part in text.split("x")]
    return text if WORD.fullmatch(text) and text not in ("true", "false") else parse_json(text, "the value")


def _tidy(method: str, text: str) -> str:
    """A value in its one spelling."""
    try:
        value = _value(text)
    except ValueError:
        value = None
    if isinstance(value, list):
        return show_rank(value)
    if value is None or not isinstance(value, str | bool | int | float):
        raise ValueError(f"method {method!r}: {text!r} is not a value; expected 8, 0.1, 2x12, true, false or a name")
    return value if isinstance(value, str) else json.dumps(value)
