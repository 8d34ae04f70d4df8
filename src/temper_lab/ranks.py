"""Ranks as people write them: 8, 2x12, or 0.1 of the dense parameters."""

from __future__ import annotations

from typing import Any

from temper.generators.base import Rank


def parse_rank(text: str) -> Rank:
    """The rank of a text, or a ValueError."""
    parts = text.lower().split("x")
    if all(part.isdigit() for part in parts):
        numbers = tuple(int(part) for part in parts)
        return numbers[0] if len(numbers) == 1 else numbers
    try:
        return float(text)
    except ValueError:
        raise ValueError(
            f"--rank is {text!r}; expected a number like 8, numbers like 2x12, or a share like 0.1"
        ) from None


def show_rank(rank: Any) -> str:
    """The same backwards; lists are what JSON makes of tuples."""
    return "x".join(map(str, rank)) if isinstance(rank, list | tuple) else str(rank)
