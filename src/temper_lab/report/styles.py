"""One colour, dash and marker for every method, the same in all figures."""

from __future__ import annotations

import colorsys
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Style:
    """How a method looks.

    Args:
        color: readable on white and on black.
        dash: a name of `DASHES`.
        marker: a name of `MARKERS`.
    """

    color: str
    dash: str = "solid"
    marker: str = "circle"

    def rgba(self, alpha: float) -> str:
        return f"rgba({', '.join(str(part) for part in _rgb(self.color))}, {alpha:g})"


# Plotly's names, and what matplotlib calls them.
DASHES = {
    "solid": "-",
    "dash": (0, (5, 2)),
    "dot": (0, (1.2, 1.6)),
    "dashdot": (0, (5, 1.6, 1.2, 1.6)),
    "longdash": (0, (9, 2.5)),
}
MARKERS = {
    "circle": "o",
    "square": "s",
    "diamond": "D",
    "triangle-up": "^",
    "triangle-down": "v",
    "cross": "P",
    "x": "X",
    "star": "*",
}

# A family has a hue, its members differ in shade, dash and marker too: hues alone would not do for everybody.
STYLES = {
    "residual": Style("#808080", "dash", "x"),
    "hc": Style("#7c9fd6", "dot", "triangle-down"),
    "mhc": Style("#2a6fc9", "solid", "square"),
    "mhc-identity": Style("#6f6fb5", "dot", "x"),
    "mhc-lite": Style("#5aa2e6", "dashdot", "diamond"),
    "kromhc": Style("#2b93b8", "dash", "triangle-up"),
    "temper-cp": Style("#e8871e", "solid", "circle"),
    "temper-tucker": Style("#d1422f", "solid", "star"),
    "temper-tt": Style("#b8602b", "dash", "triangle-up"),
    "temper-tucker-frozen": Style("#e2766c", "dot", "diamond"),
    "temper-tucker-res": Style("#b5456f", "dashdot", "square"),
    "temper-cp-krom": Style("#2f9e62", "solid", "cross"),
    "temper-tucker-krom": Style("#4b8a35", "dash", "triangle-down"),
    "temper-slim": Style("#1fa08c", "dot", "circle"),
}
# Presets that are not in the table yet.
OTHERS = ("#9467bd", "#8c6d46", "#b070c0", "#6f6fb5")
PLAIN = Style("#808080", "dot")


def styles(preset_of: Mapping[str, str]) -> dict[str, Style]:
    """A style for each label: its preset's, in other shades, dashes and markers for a preset with other options."""
    found: dict[str, Style] = {}
    strangers = list(dict.fromkeys(preset for preset in preset_of.values() if preset not in STYLES))
    seen: dict[str, int] = {}
    for label, preset in preset_of.items():
        base = STYLES.get(preset) or Style(OTHERS[strangers.index(preset) % len(OTHERS)])
        index = seen.get(preset, 0)
        # The bare preset keeps its own looks, wherever it stands.
        if label != preset:
            index = seen[preset] = index + 1
        found[label] = _varied(base, index if label != preset else 0)
    return found


def _varied(base: Style, index: int) -> Style:
    if index == 0:
        return base
    red, green, blue = (part / 255 for part in _rgb(base.color))
    hue, light, full = colorsys.rgb_to_hls(red, green, blue)
    # Alternately darker and lighter, away from the preset's own.
    step = (index + 1) // 2 * (0.07 if index % 2 else -0.07)
    shade = colorsys.hls_to_rgb(hue, min(0.68, max(0.38, light + step)), full)
    dashes, markers = list(DASHES), list(MARKERS)
    return Style(
        "#" + "".join(f"{round(255 * part):02x}" for part in shade),
        dashes[(dashes.index(base.dash) + index) % len(dashes)],
        markers[(markers.index(base.marker) + index) % len(markers)],
    )


def _rgb(color: str) -> tuple[int, ...]:
    return tuple(int(color[place : place + 2], 16) for place in (1, 3, 5))
