"""A study as tables in a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from temper.config import HEADS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def show(report: dict[str, Any], console: Console) -> None:
    """What the logits see, how far the two models are apart, and what that comes to."""
    console.print(_ranks(report))
    console.print(_bounds(report))
    for line in summary(report):
        console.print(line, highlight=False)


def summary(report: dict[str, Any]) -> list[str]:
    """The whole model in words."""
    whole, size = report["whole"], report["whole"]["size"]
    lines = [
        f"all {len(report['sites'])} sites: the streams end {whole['measured'] / size:.3%} apart (measured), at most "
        f"{_share(whole['bound'] / size)} (each bound carried on by the measured growth of the sites behind it)"
        + (f", {loose(whole['bound'], whole['measured'])} loose" if whole["measured"] else ""),
        f"loss {whole['loss']:.4f} against {whole['loss_against']:.4f}; largest change of a logit "
        f"{whole['largest_logit_change']:.3g}",
    ]
    mixers = [site["mixer"] for site in report["sites"]]
    steepest = max(mixers, key=lambda mixer: mixer["slope_max"])
    line = f"{steepest['name']}: steepest slope {steepest['slope_max']:.4f} on these logits"
    if "limit_slope_max" in steepest:
        limit, far = (max(mixer[name] for mixer in mixers) for name in ("limit_slope_max", "distance_max"))
        line += f", {limit:.4f} in the limit, which res is within {far:.1e} of"
    return [*lines, f"{line}; proved {steepest['constant']:.4f}"]


def loose(bound: float, measured: float) -> str:
    """How many times the bound is what was measured."""
    return f"{bound / measured:,.3g}x" if measured else "-"


def _ranks(report: dict[str, Any]) -> Table:
    inputs = report["streams"] * report["width"]
    table = _table(f"What the logits see: rank (nullity) of every compression, of N D = {inputs:,} directions")
    for name in ("site", "generators"):
        table.add_column(name, no_wrap=True)
    for name in (*HEADS, "all logits"):
        table.add_column(name, justify="right", no_wrap=True)
    for site in report["sites"]:
        heads = site["heads"]
        kinds = " / ".join(dict.fromkeys(head["generator"] for head in heads.values()))
        spectra = [*(heads[head]["compression"] if head in heads else None for head in HEADS), site["together"]]
        cells = (f"{found['rank']} ({found['nullity']})" if found else "-" for found in spectra)
        table.add_row(site["site"], kinds, *cells)
    return table


def _bounds(report: dict[str, Any]) -> Table:
    kinds = dict.fromkeys(head["against"] for site in report["sites"] for head in site["heads"].values())
    table = _table(
        f"Against {' / '.join(kinds)}, on {report['tokens']:,} tokens; loose is bound / measured where it is least"
    )
    table.add_column("site", no_wrap=True)
    names = ["|dW|/|W|\npre res post", "logits loose\npre res post", "routing loose\npre res post"]
    for name in [*names, "block\nmeasured", "bound", "loose", "L_f", "mixer\nslope"]:
        table.add_column(name, justify="right", no_wrap=True)
    for site in report["sites"]:
        heads, found, block = site["heads"], site["deviation"], site["deviation"]["block"]
        table.add_row(
            site["site"],
            "  ".join(f"{heads[head]['relative_error']:.2f}" if head in heads else "-" for head in HEADS),
            "  ".join(_loose(found["logits"][head]) for head in HEADS),
            "  ".join(_loose(found["routing"][head]) for head in HEADS),
            f"{block['measured_max']:.3g}",
            f"{block['bound_max']:.3g}",
            _loose(block),
            f"{found['branch_lipschitz']:.3g}",
            f"{site['mixer']['slope_max']:.3f}",
        )
    return table


def _loose(gap: dict[str, float]) -> str:
    return loose(1.0, gap["ratio_max"])


def _share(share: float) -> str:
    return f"{share:.1%}" if share < 10 else f"{share:,.3g} times their size"


def _table(title: str) -> Table:
    from rich.table import Table

    return Table(title=title, title_justify="left")
