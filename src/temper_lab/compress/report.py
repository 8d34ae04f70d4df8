"""What a compression did, for JSON and for people."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from temper import theory
from temper.convert import Compressed
from temper_lab.compress.settings import Settings
from temper_lab.compress.subject import Subject
from temper_lab.compress.text import Text
from temper_lab.ranks import show_rank

if TYPE_CHECKING:
    from rich.console import Console

FORMAT = "temper-compress-1"


def make_report(
    settings: Settings,
    subject: Subject,
    text: Text,
    compressed: Compressed[Any],
    deviations: dict[str, theory.Deviation],
    bpb: dict[str, float | None],
) -> dict[str, Any]:
    """Plain values that JSON can hold."""
    total = sum(parameter.numel() for parameter in subject.network.parameters())
    after = compressed.after
    return {
        "format": FORMAT,
        "model": str(settings.model),
        "to": settings.to,
        "asked": {name: _plain(getattr(settings, name)) for name in ("rank", "error", "params")},
        "plain": settings.plain,
        "calibrated": None if settings.calibrate is None else _calibration(settings),
        "finetuned": {"steps": settings.finetune, "everything": settings.finetune_all} if settings.finetune else None,
        "parameters": {
            "added": {"before": compressed.before, "after": after},
            "total": {"before": total + compressed.before - after, "after": total},
        },
        "error": compressed.error,
        "corpus": None if text.val is None else text.val.name,
        "bpb": bpb,
        "note": text.note,
        "sites": _sites(compressed, deviations),
    }


def _calibration(settings: Settings) -> dict[str, Any]:
    return {"corpus": settings.calibrate, "tokens": settings.calibrate_tokens, "seed": settings.seed}


def _sites(compressed: Compressed[Any], deviations: dict[str, theory.Deviation]) -> list[dict[str, Any]]:
    sites: dict[str, dict[str, Any]] = {}
    for head in compressed.heads:
        deviation = deviations.get(head.site)
        site = sites.setdefault(head.site, {"site": head.site, "heads": {}, "deviation": None})
        values = asdict(head)
        site["heads"][head.head] = {key: _plain(values[key]) for key in values if key not in ("site", "head")}
        if deviation is not None:
            site["deviation"] = deviation.to_dict()
    return list(sites.values())


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def show(report: dict[str, Any], console: Console) -> None:
    """The table of all generators, and the lines that matter most below it."""
    from rich.table import Table

    is_calibrated = report["calibrated"] is not None
    table = Table(title=f"{report['model']} to {report['to']}", title_justify="left")
    for name in ("site", "head", "rank"):
        table.add_column(name, no_wrap=True)
    columns = ["parameters", "of before", "weight error", *(["data error"] if is_calibrated else [])]
    columns += ["logits off by (bound)", "streams off by (bound)"]
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for site in report["sites"]:
        for head, row in site["heads"].items():
            is_first = head == next(iter(site["heads"]))
            cells = [site["site"] if is_first else "", head, show_rank(row["rank"])]
            cells += [f"{row['after']:,}", f"{row['after'] / row['before']:.1%}", f"{row['weight_error']:.2%}"]
            cells += [f"{row['data_error']:.2%}"] if is_calibrated else []
            gaps = site["deviation"] or {}
            cells += _gap(gaps.get("logits", {}).get(head)) + _gap(gaps.get("block") if is_first else None)
            table.add_row(*cells)
        table.add_section()
    console.print(table)
    for line in lines(report):
        console.print(line, highlight=False, markup=False)


def lines(report: dict[str, Any]) -> list[str]:
    """Parameters, error and bits per byte in a few lines."""
    added, total = report["parameters"]["added"], report["parameters"]["total"]
    where = "of the logits on the calibration text" if report["calibrated"] else "of the weights"
    if report["calibrated"] and report["asked"]["rank"] is None:
        where += ", each counted by what the loss minds"
    said = [
        f"added parameters  {added['before']:,} -> {added['after']:,} ({added['after'] / added['before']:.1%})",
        f"all parameters    {total['before']:,} -> {total['after']:,} ({total['after'] / total['before']:.1%})",
        f"relative error    {report['error']:.3%} {where}",
    ]
    bpb = report["bpb"]
    if bpb["before"] is not None:
        words = f"bits per byte     {bpb['before']:.5f} -> {bpb['after']:.5f} ({bpb['after'] - bpb['before']:+.2g})"
        if bpb.get("finetuned") is not None:
            steps = report["finetuned"]["steps"]
            words += f" -> {bpb['finetuned']:.5f} ({bpb['finetuned'] - bpb['before']:+.2g}) after {steps} steps"
        said.append(f"{words} on {report['corpus']}")
    return [*said, report["note"]] if report["note"] else said


def _gap(gap: dict[str, float] | None) -> list[str]:
    return [""] if gap is None else [f"{gap['measured_max']:.2g} ({gap['bound_max']:.2g})"]
