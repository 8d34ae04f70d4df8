"""The paper's parameter-efficiency figure: parameters per hyper-connection against N."""

from __future__ import annotations

from pathlib import Path

from temper_lab.figures import check_target, save

# Dense baselines in greys and broken lines; each tensor family in a colour of its own.
STYLES = {
    "hc": ("#9e9e9e", ":"),
    "mhc": ("#424242", "-"),
    "mhc-identity": ("#bdbdbd", "--"),
    "mhc-lite": ("#757575", "--"),
    "kromhc": ("#616161", "-."),
    "temper-cp": ("#1565c0", "-"),
    "temper-cp-krom": ("#1e88e5", "--"),
    "temper-slim": ("#4fc3f7", "-"),
    "temper-tucker": ("#c62828", "-"),
    "temper-tucker-frozen": ("#e57373", ":"),
    "temper-tucker-krom": ("#ef5350", "--"),
    "temper-tucker-res": ("#ad1457", "-."),
    "temper-tt": ("#2e7d32", "-"),
}


def draw(per_site: dict[str, dict[str, int]], dim: int, path: Path) -> None:
    """One line per method, log scale on both axes; methods without parameters are left out."""
    check_target(path)
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 5))
    lines = {name: {int(n): count for n, count in rows.items() if count} for name, rows in per_site.items()}
    lines = {name: rows for name, rows in lines.items() if rows}
    for name, rows in lines.items():
        color, dash = STYLES.get(name, (None, "-"))
        numbers = sorted(rows)
        axes.plot(numbers, [rows[n] for n in numbers], dash, color=color, marker="o", markersize=4, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({n for rows in lines.values() for n in rows})
    axes.set_xticks(ticks, [str(n) for n in ticks])
    axes.minorticks_off()
    # N! leaves every other method at the bottom of the page; its line may leave the page instead.
    rest = [count for name, rows in lines.items() if name != "mhc-lite" for count in rows.values()]
    if rest:
        axes.set_ylim(min(rest) / 1.6, max(rest) * 6)
    axes.set_xlabel("residual streams N")
    axes.set_ylabel("trainable parameters per hyper-connection")
    axes.set_title(f"Routing parameters against the number of streams (D = {dim})", fontsize=11)
    axes.grid(True, which="major", alpha=0.25)
    order = sorted(lines, key=lambda name: -lines[name][max(lines[name])])
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(
        [handles[name] for name in order],
        order,
        loc="center left",
        bbox_to_anchor=(1.01, 0.5),
        frameon=False,
        fontsize=9,
    )
    save(figure, path)
    plt.close(figure)
