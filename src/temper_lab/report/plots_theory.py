"""The figure of `temper theory`: measurements and bounds for every site, spectra, and the slope of the mixer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from temper.config import HEADS
from temper_lab.report.palette import PARTS
from temper_lab.report.plots_mpl import check_target, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {name: style.color for name, style in PARTS.items()}
# With at most this many sites, each has its name below the axis.
NAMED = 12
# The smallest plotted singular value, relative to the largest.
FAINTEST = 1e-8

Gaps = dict[str, list[dict[str, float]]]


def draw(report: dict[str, Any], path: Path) -> None:
    """Draws six panels: logits, routing and block above; depth, spectra and mixer below."""
    check_target(path)
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sites = report["sites"]
    found = [site["deviation"] for site in sites]
    figure, ((logits, routing, block), (depth, spectra, mixer)) = plt.subplots(
        2, 3, figsize=(15, 8.4), layout="constrained"
    )
    _gaps(logits, {head: [site["logits"][head] for site in found] for head in HEADS}, "Logits: the Lemma")
    _gaps(routing, {head: [site["routing"][head] for site in found] for head in HEADS}, "Routing weights")
    terms: Gaps = {head: [site["terms"][head] for site in found] for head in HEADS}
    _gaps(block, terms | {"block": [site["block"] for site in found]}, "Block: Theorem 2 and its three terms")
    _depth(depth, sites)
    _spectra(spectra, sites)
    _mixer(mixer, sites)
    for axes in (logits, routing, block, depth, mixer):
        _name_sites(axes, sites)
    against = report["against"] or " / ".join(dict.fromkeys(_widest(site)["against"] for site in sites))
    figure.suptitle(
        f"{report['model']} against {against}: N = {report['streams']}, D = {report['width']}, "
        f"{report['tokens']:,} tokens. Dashed: bound. Solid: measured, largest token.",
        fontsize=11,
    )
    save(figure, path)
    plt.close(figure)


def _gaps(axes: Axes, gaps: Gaps, title: str) -> None:
    for name, values in gaps.items():
        color, places = COLORS[name], range(len(values))
        width = 2.2 if name == "block" else 1.3
        axes.plot(places, [gap["bound_max"] for gap in values], "--", color=color, marker="v", markersize=4, lw=width)
        measured = [gap["measured_max"] or float("nan") for gap in values]
        axes.plot(places, measured, "-", color=color, marker="o", markersize=4, lw=width, label=name)
    _scale(axes)
    _finish(axes, title, "Frobenius distance")


def _depth(axes: Axes, sites: list[dict[str, Any]]) -> None:
    places = range(len(sites))
    bound = [site["bound"] / site["size"] for site in sites]
    measured = [site["measured"] / site["size"] or float("nan") for site in sites]
    axes.plot(places, bound, "--", color=COLORS["block"], marker="v", markersize=4, label="bound")
    axes.plot(places, measured, "-", color=COLORS["block"], marker="o", markersize=4, label="measured")
    _scale(axes)
    _finish(axes, "Whole model: distance of the streams so far", "of their size")


def _spectra(axes: Axes, sites: list[dict[str, Any]]) -> None:
    """Draws the singular values of every in_map, scaled to a largest value of one; later sites are darker."""
    for index, site in enumerate(sites):
        shade = 0.25 + 0.75 * (index + 1) / len(sites)
        for head, found in site["heads"].items():
            values = [value for value in found["routing"]["values"] if value > 0]
            label = head if index == len(sites) - 1 else None
            shares = [value / values[0] for value in values]
            axes.plot(range(1, len(values) + 1), shares, color=COLORS[head], alpha=shade, marker=".", lw=1, label=label)
    _scale(axes)
    # Values below the rounding of the weights are not shown.
    axes.set_ylim(bottom=FAINTEST, top=2)
    axes.set_xlabel("singular value (later sites are darker)")
    axes.set_xscale("log", base=2)
    most = max(len(_widest(site)["routing"]["values"]) for site in sites)
    ticks = [2**k for k in range(most.bit_length())]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlim(0.9, 1.1 * most)
    _finish(axes, "What the logits see: spectra of the maps", "share of the largest")


def _widest(site: dict[str, Any]) -> dict[str, Any]:
    """The head of res, or of pre where the mixer takes no logits."""
    head: dict[str, Any] = site["heads"].get("res", site["heads"]["pre"])
    return head


def _mixer(axes: Axes, sites: list[dict[str, Any]]) -> None:
    places, mixers = range(len(sites)), [site["mixer"] for site in sites]
    axes.axhline(mixers[0]["constant"], ls="--", color=COLORS["res"], label=f"proved: {mixers[0]['constant']:.3g}")
    axes.plot(places, [m["slope_max"] for m in mixers], "o-", color=COLORS["res"], markersize=4, label="largest")
    axes.plot(places, [m["slope_mean"] for m in mixers], "o:", color=COLORS["res"], markersize=4, label="mean")
    axes.set_ylim(0, 1.15 * max(mixers[0]["constant"], *(m["slope_max"] for m in mixers)) or 1)
    _finish(axes, f"Slope of the {mixers[0]['name']} mixer on these logits", "largest singular value")


def _scale(axes: Axes) -> None:
    """Sets a logarithmic scale unless nothing is above zero, as for equal models or untrained weights."""
    if any(value > 0 for line in axes.get_lines() for value in cast("Any", line.get_ydata())):
        axes.set_yscale("log")


def _finish(axes: Axes, title: str, label: str) -> None:
    axes.set_title(title, fontsize=11)
    axes.set_ylabel(label)
    axes.grid(True, which="major", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)


def _name_sites(axes: Axes, sites: list[dict[str, Any]]) -> None:
    if len(sites) > NAMED:
        axes.set_xlabel("site")
        return
    short = [site["site"].removeprefix("block ").replace("attention", "attn") for site in sites]
    axes.set_xticks(range(len(sites)), short, rotation=30, fontsize=8)
