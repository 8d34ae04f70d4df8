"""Charts as files for papers, by matplotlib: PNG, SVG or PDF."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from temper_lab.io import atomic_file
from temper_lab.report.charts import Axis, Chart, Mark, Panel, log_ticks
from temper_lab.report.palette import DASHES, MARKERS

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


FORMATS = (".png", ".svg", ".pdf")


def check_target(path: Path) -> None:
    """Raises ValueError for a file that could not be written, before any work is done."""
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"cannot write a figure to {path}: expected a name that ends in {', '.join(FORMATS)}")
    if path.is_dir():
        raise ValueError(f"cannot write a figure to {path}: it is a folder")


def save(figure: Figure, path: Path) -> None:
    """Writes a figure under its name only when it is complete."""
    check_target(path)
    with atomic_file(path) as part:
        figure.savefig(part, dpi=160, bbox_inches="tight")


SUFFIXES = (".png", ".svg")
# A name with a dollar sign is not mathematics, and text in an SVG stays text.
SETTINGS = {"text.parse_math": False, "svg.fonttype": "none", "font.size": 9}
PIXELS = 100


def draw(chart: Chart, folder: Path) -> list[Path]:
    """Writes a chart under its name as PNG and SVG."""
    paths = [folder / f"{chart.name}{suffix}" for suffix in SUFFIXES]
    draw_to(chart, *paths)
    return paths


def draw_to(chart: Chart, *paths: Path) -> None:
    """Writes a chart to files."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(cast("Any", SETTINGS)):
        height = max(panel.height for panel in chart.panels) / PIXELS
        figure = Figure(figsize=(5.4 * len(chart.panels) + 1.2, height + 0.5), layout="constrained")
        all_axes = figure.subplots(1, len(chart.panels), squeeze=False)[0]
        for panel, axes in zip(chart.panels, all_axes, strict=True):
            _panel(panel, axes)
        figure.suptitle(chart.title, fontsize=11)
        entries: dict[str, Artist] = {}
        for axes in all_axes:
            for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
                entries.setdefault(name, handle)
        if not all(panel.is_rows for panel in chart.panels):
            figure.legend(entries.values(), entries.keys(), loc="outside right center", frameon=False, fontsize=8)
        for path in paths:
            save(figure, path)
            # Laid out once for all files, because layout is half of the work.
            figure.set_layout_engine("none")


def _panel(panel: Panel, axes: Axes) -> None:
    for rule in panel.rules:
        line = axes.axvline if rule.is_vertical else axes.axhline
        line(rule.value, color=rule.style.color, linestyle=DASHES[rule.style.dash], linewidth=1.2, label=rule.name)
    for mark in panel.marks:
        _mark(mark, axes)
    _scale(panel.x, axes, "x")
    _scale(panel.y, axes, "y")
    if panel.is_rows:
        axes.set_ylim(min(y for y, _ in panel.y.ticks) - 0.6, 0.6)
    axes.set_title(panel.title, fontsize=10)
    axes.grid(True, which="major", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _mark(mark: Mark, axes: Axes) -> None:
    color, faint = mark.style.color, 0.4 if mark.is_faint else 1.0
    # Labels with a leading underscore would be left out of the legend; rings and faint points have no entry.
    name = mark.name.replace("_", "\u02cd", mark.name.startswith("_"))
    axes.errorbar(
        mark.x,
        mark.y,
        xerr=_reach(mark.x, mark.x_low, mark.x_high),
        yerr=_reach(mark.y, mark.y_low, mark.y_high),
        color=color,
        alpha=faint,
        linestyle=DASHES[mark.style.dash] if mark.line else "none",
        linewidth=1.4,
        marker="o" if mark.is_ring else MARKERS[mark.style.marker] if mark.points else None,
        markersize=11 if mark.is_ring else 3 if mark.is_faint or (mark.line and mark.points) else 6,
        markerfacecolor="none" if mark.is_ring else None,
        elinewidth=1.2,
        capsize=2.5,
        label=None if mark.is_ring or (mark.is_faint and mark.points) else name,
    )
    if mark.low:
        axes.fill_between(mark.x, mark.low, mark.high, color=color, alpha=0.15, linewidth=0)


def _reach(centres: tuple[float, ...], low: tuple[float, ...], high: tuple[float, ...]) -> list[list[float]] | None:
    if not low:
        return None
    below = [centre - end for centre, end in zip(centres, low, strict=True)]
    return [below, [end - centre for centre, end in zip(centres, high, strict=True)]]


def _scale(axis: Axis, axes: Axes, which: str) -> None:
    """Sets the label, scale and ticks of one axis."""
    setter = {name: getattr(axes, f"set_{which}{name}") for name in ("label", "scale", "ticks", "lim")}
    setter["label"](axis.label)
    if axis.is_log:
        setter["scale"]("log", base=2 if axis.ticks else 10)
    if axis.limits is not None:
        setter["lim"](*axis.limits)
    if ticks := axis.ticks or (log_ticks(*getattr(axes, f"get_{which}lim")()) if axis.is_log else ()):
        setter["ticks"]([value for value, _ in ticks], [name for _, name in ticks])
        getattr(axes, f"{which}axis").minorticks_off()
    elif not axis.is_log:
        axes.locator_params(axis=cast("Any", which), nbins=5)
