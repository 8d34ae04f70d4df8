"""One colour, dash and marker for every method, in all figures and pages; a test forbids colours elsewhere."""

from __future__ import annotations

import colorsys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Style:
    """The colour, line and marker of a method.

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


# Plotly's names, and matplotlib's names for the same.
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

# A family has a hue; its members also differ in shade, dash and marker, for readers who cannot tell hues apart.
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
# Styles of presets that are not in the table.
OTHERS = ("#9467bd", "#8c6d46", "#b070c0", "#6f6fb5")
# Styles of other packages in benchmarks.
PEERS = {"pypi-hc": Style("#9e9e9e", "dashdot", "cross"), "pypi-mhc": Style("#5c5c5c", "dashdot", "diamond")}
# Compressed generators have the styles of the methods that are trained with them.
GENERATORS = {"tucker": STYLES["temper-tucker"], "cp": STYLES["temper-cp"], "tt": STYLES["temper-tt"]}
# The style of models trained in low rank, beside compressed ones.
TRAINED = Style(OTHERS[0], marker="x")
# The colours of a site's parts, whatever its method.
PARTS = {"pre": Style("#3f7fbf"), "res": Style("#c0504d"), "post": Style("#4f9a57"), "block": Style("#6b6b6b")}
# The verdicts of a claim, which differ in shape as well as in colour, and the region in which a claim is true.
VERDICTS = {
    "shown": Style("#1b8f56", marker="circle"),
    "refuted": Style("#d0443a", marker="x"),
    "open": Style("#8a8f98", marker="diamond"),
}
REGION = Style("#5a8fd0")
PLAIN = Style("#808080", "dot")


def styles_of(methods: Iterable[str]) -> dict[str, Style]:
    """A style for each method as people write it, `temper-cp:rank=8`, and for other people's code."""
    names = list(dict.fromkeys(methods))
    found = styles({name: name.partition(":")[0] for name in names if name not in PEERS})
    return {name: PEERS.get(name) or found[name] for name in names}


def styles(preset_of: Mapping[str, str]) -> dict[str, Style]:
    """A style for each label: its preset's, in other shades, dashes and markers for a preset with other options."""
    found: dict[str, Style] = {}
    strangers = list(dict.fromkeys(preset for preset in preset_of.values() if preset not in STYLES))
    seen: dict[str, int] = {}
    for label, preset in preset_of.items():
        base = STYLES.get(preset) or Style(OTHERS[strangers.index(preset) % len(OTHERS)])
        index = seen.get(preset, 0)
        # The bare preset keeps its own style, whatever its position.
        if label != preset:
            index = seen[preset] = index + 1
        found[label] = _varied(base, index if label != preset else 0)
    return found


def _varied(base: Style, index: int) -> Style:
    if index == 0:
        return base
    red, green, blue = (part / 255 for part in _rgb(base.color))
    hue, light, full = colorsys.rgb_to_hls(red, green, blue)
    # Shades alternate between darker and lighter than the preset's own.
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
