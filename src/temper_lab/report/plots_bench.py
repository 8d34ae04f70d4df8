"""The figure of `temper bench`: the overhead of every method and backend for each N, and a site's growth with N."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from temper_lab.report.palette import MARKERS, Style, styles_of
from temper_lab.report.plots_mpl import check_target, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colours and markers show methods; shades and dashes show backends.
SHADES = {"cpu": 1.0, "fused": 0.55, "naive": 0.25}
DASHES = {"cpu": "-", "fused": "--", "naive": ":", None: "-."}

Row = dict[str, Any]


def draw(report: dict[str, Any], path: Path) -> None:
    """Draws a panel of bars for each N, and a panel of lines."""
    check_target(path)
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    bars, growth = [*report["pair"], *report["peers"]], report["growth"]
    numbers, places = list(dict.fromkeys(row["streams"] for row in bars)), _places(bars)
    widths = [3.4] * len(numbers) + [5.2] * bool(growth)
    size = (sum(widths) + 1.2, max(4.5, 0.3 * len(places) + 1.6))
    figure, all_axes = plt.subplots(
        1, len(widths), figsize=size, width_ratios=widths, squeeze=False, layout="constrained"
    )
    looks = styles_of(row["method"] for row in (*bars, *growth))
    for index, (n, axes) in enumerate(zip(numbers, all_axes[0], strict=False)):
        _bars(axes, [row for row in bars if row["streams"] == n], places, looks)
        axes.set_yticks(list(places.values()), list(places) if index == 0 else [""] * len(places), fontsize=8)
        axes.set_title(f"N = {n}", fontsize=11)
    if growth:
        _lines(all_axes[0, -1], growth, looks)
    setting = report["setting"]
    figure.suptitle(
        f"Hyper-connections against plain residual adds: forward + backward, width {setting['width']}, "
        f"{setting['tokens']} tokens, {setting['threads']} thread{'s' if setting['threads'] > 1 else ''}",
        fontsize=11,
    )
    save(figure, path)
    plt.close(figure)


def _places(rows: list[Row]) -> dict[str, float]:
    """The place of each bar, the same for every N, with a gap between methods."""
    places: dict[str, float] = {}
    place, method = 0.0, None
    for row in rows:
        if _label(row) not in places:
            place += 1.0 if row["method"] == method else 1.5
            places[_label(row)], method = place, row["method"]
    return places


def _bars(axes: Axes, rows: list[Row], places: dict[str, float], looks: dict[str, Style]) -> None:
    """Draws the time that two sites add to a pair, with a line for the middle half of the rounds."""
    heights = [places[_label(row)] for row in rows]
    values = [100 * (row["ratio"] - 1) for row in rows]
    spreads = [row["ratio_spread"] for row in rows]
    below = [100 * (spread["median"] - spread["low"]) for spread in spreads]
    above = [100 * (spread["high"] - spread["median"]) for spread in spreads]
    axes.barh(
        heights,
        values,
        xerr=[below, above],
        color=[looks[row["method"]].color for row in rows],
        height=0.85,
        error_kw={"elinewidth": 0.8, "ecolor": "black"},
    )
    for patch, row in zip(axes.patches, rows, strict=True):
        patch.set_alpha(SHADES.get(row["backend"], 1.0))
    largest = max(value + over for value, over in zip(values, above, strict=True))
    for height, value, over in zip(heights, values, above, strict=True):
        text = f"{value:.0f}%" if value >= 10 else f"{value:.1f}%"
        axes.text(value + over + 0.02 * largest, height, text, va="center", fontsize=8)
    axes.set_xlim(0, 1.2 * largest)
    axes.set_ylim(max(places.values()) + 0.8, min(places.values()) - 0.8)
    axes.set_xlabel("added time of a block pair, %")
    axes.spines[["top", "right"]].set_visible(False)


def _lines(axes: Axes, rows: list[Row], looks: dict[str, Style]) -> None:
    """Draws the milliseconds of one site against N, on logarithmic axes."""
    from matplotlib.ticker import LogLocator

    families: dict[tuple[str, str | None], list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["streams"]):
        families.setdefault((row["method"], row["backend"]), []).append(row)
    for (method, backend), members in families.items():
        axes.plot(
            [row["streams"] for row in members],
            [row["site_ms"]["median"] for row in members],
            DASHES.get(backend, "-"),
            color=looks[method].color,
            marker=MARKERS[looks[method].marker],
            markersize=5,
            linewidth=1.3,
            label=_label(members[0]),
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({row["streams"] for row in rows})
    axes.set_xticks(ticks, [str(n) for n in ticks])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set_xlabel("residual streams N")
    axes.set_ylabel("one site, ms")
    axes.set_title("Growth with N", fontsize=11)
    axes.grid(True, which="major", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=8)


def _label(row: Row) -> str:
    return f"{row['method']} {row['backend']}" if row["backend"] else row["method"]
