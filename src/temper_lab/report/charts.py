"""What a figure shows, before anything draws it: once for matplotlib and once for plotly."""

from __future__ import annotations

import math
from dataclasses import dataclass

from temper_lab.report.styles import Style

Numbers = tuple[float, ...]


@dataclass(frozen=True)
class Axis:
    """
    Args:
        ticks: values with their names; empty lets the drawer choose.
        is_log: base 2 if `ticks` are given, else 10.
        digits: of the values that people are shown; None for whole numbers with thousands.
        limits: the ends; None fits them to what is shown.
    """

    label: str = ""
    is_log: bool = False
    ticks: tuple[tuple[float, str], ...] = ()
    digits: int | None = None
    limits: tuple[float, float] | None = None


@dataclass(frozen=True)
class Mark:
    """A line, points, or both, of one method.

    Args:
        method: what it belongs to in the legend; empty for what is always shown.
        low, high: a band around y.
        x_low, x_high, y_low, y_high: error bars, as values.
        texts: one for each point, shown with its values.
        is_faint: background.
        is_ring: an open circle around points that stand out.
    """

    name: str
    style: Style
    x: Numbers
    y: Numbers
    method: str = ""
    line: bool = True
    points: bool = False
    low: Numbers = ()
    high: Numbers = ()
    x_low: Numbers = ()
    x_high: Numbers = ()
    y_low: Numbers = ()
    y_high: Numbers = ()
    texts: tuple[str, ...] = ()
    is_faint: bool = False
    is_ring: bool = False


@dataclass(frozen=True)
class Rule:
    """A straight line through the whole panel: a baseline."""

    name: str
    style: Style
    value: float
    is_vertical: bool = False
    method: str = ""


@dataclass(frozen=True)
class Panel:
    """
    Args:
        height: in pixels of the page.
    """

    title: str
    x: Axis
    y: Axis
    marks: tuple[Mark, ...] = ()
    rules: tuple[Rule, ...] = ()
    height: int = 380

    @property
    def is_rows(self) -> bool:
        """Whether each method has a row of its own."""
        return bool(self.y.ticks) and not self.y.is_log


@dataclass(frozen=True)
class Chart:
    """A figure of one or several panels.

    Args:
        name: of its files.
        caption: what a reader has to know.
    """

    name: str
    title: str
    panels: tuple[Panel, ...]
    caption: str = ""


def file_name(text: str) -> str:
    """A text as a part of a chart's name: labels come from a file, and must not lead elsewhere."""
    return "".join(character if character.isalnum() or character in "-." else "_" for character in text)


def log_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Ticks of a logarithmic axis as people write them: 10k, 20k, 50k; only powers of ten over a wide range."""
    digits = (1, 2, 5) if high / low < 200 else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [
        (value, _short(value)) for power in powers for digit in digits if low <= (value := digit * 10.0**power) <= high
    ]


def _short(value: float) -> str:
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{suffix}"
    return f"{value:g}"
