"""The tables of a report."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from temper_lab.compare import vary
from temper_lab.report.comparisons import Comparison
from temper_lab.report.counts import added, paper, paper_row
from temper_lab.report.formats import DASH, Column, Row, Table, decimal, percent, spread, whole
from temper_lab.report.results import Run, Study, number
from temper_lab.report.series import average
from temper_lab.report.statistics import mean, sd

SCALE = (
    "The paper's models are larger and were trained on other data, so its numbers stand beside ours for their order "
    "only: loss, bpb and CORE of the two are not comparable."
)


def main_table(study: Study) -> Table:
    """The paper's table 1 with our numbers beside the paper's."""
    group = ("streams", *study.fields)
    # Those of the figures first.
    variants = sorted(study.variants, key=lambda variant: variant.settings != study.settings)
    places = itertools.product(study.streams, variants)
    rows = [_main_row(variant, label, n) for n, variant in places for label in variant.labels_at(n)]
    lowest: dict[tuple[Any, ...], float] = {}
    for row in rows:
        if row["bpb"] is not None:
            key = tuple(row[name] for name in group)
            lowest[key] = min(row["bpb"], lowest.get(key, row["bpb"]))
    columns = [
        Column("method", lambda row: row["method"], "method", is_text=True),
        Column("N", lambda row: str(row["streams"]), "streams"),
        *vary_columns(study.fields),
        Column("seeds", _seeds, "seeds"),
        Column("added parameters", lambda row: whole(row["added"]), "added"),
        Column("of mhc", lambda row: percent(row["of_mhc"]), "of_mhc"),
        Column("train loss", lambda row: spread(row["loss"], row["loss_sd"]), "loss"),
        Column(
            "bpb",
            lambda row: spread(row["bpb"], row["bpb_sd"]),
            "bpb",
            is_strong=lambda row: row["bpb"] is not None and row["bpb"] == lowest[tuple(row[name] for name in group)],
        ),
    ]
    if any(row["core"] is not None for row in rows):
        columns.append(Column("CORE", lambda row: spread(row["core"], row["core_sd"]), "core"))
    columns += [
        Column("paper: added", lambda row: whole(row["paper_added"]), "paper_added"),
        Column("paper: loss", lambda row: decimal(row["paper_loss"], 3), "paper_loss"),
        Column("paper: bpb", lambda row: decimal(row["paper_bpb"], 3), "paper_bpb"),
        Column("paper: CORE", lambda row: decimal(row["paper_core"], 3), "paper_core"),
    ]
    note = (
        f"Mean ± standard deviation over seeds; bold is the lowest mean bpb at that N{_with(study)}, be it by noise. "
        f"Added parameters are trainable routing parameters{_at_size(study)}; of the paper's model, "
        f"D = {paper()['dim']} and {paper()['sites']} sites, also for methods that the paper does not have. {SCALE}"
    )
    if study.baseline is not None and len(study.streams) > 1:
        note += " Residual has one stream whatever N is: the same runs stand at every N, of the seeds that others have."
    return Table("main", f"{study.name}: methods beside the paper's table 1", tuple(rows), tuple(columns), note, group)


def vary_columns(fields: Iterable[str]) -> list[Column]:
    """A column for every varied field."""
    return [
        Column(vary.short(name), lambda row, name=name: DASH if row[name] is None else vary.show(row[name]), name)
        for name in fields
    ]


def _with(study: Study) -> str:
    return " and these settings" if study.fields else ""


def _main_row(study: Study, label: str, streams: int) -> dict[str, Any]:
    runs, asked = list(study.measured(label, streams).values()), study.at(label, streams)
    row: dict[str, Any] = {"method": label, "streams": streams, **study.here}
    row |= {"seeds": len(runs), "asked": len(asked)}
    row["state"] = "" if runs else "/".join(dict.fromkeys(run.status for run in asked))
    row["added"] = next((run.added for run in asked if run.added is not None), None)
    mhc = next((run.added for run in study.at("mhc", streams) if run.added), None)
    row["of_mhc"] = row["added"] / mhc if mhc and row["added"] is not None else None
    for name, values in (
        ("loss", [run.train_loss for run in runs]),
        ("bpb", [run.bpb for run in runs]),
        ("core", [run.core for run in runs]),
    ):
        known = [value for value in values if value is not None]
        row[name], row[f"{name}_sd"] = (mean(known) if known else None), sd(known)
    theirs = paper_row(label, streams)
    first = asked[0]
    row["paper_added"] = added(first.preset, first.options, streams, paper()["dim"], paper()["sites"])
    return row | {f"paper_{name}": theirs.get(name) for name in ("loss", "bpb", "core")}


def _seeds(row: Row) -> str:
    if row["state"]:
        return row["state"]
    return str(row["seeds"]) if row["seeds"] == row["asked"] else f"{row['seeds']} of {row['asked']}"


def _at_size(study: Study) -> str:
    is_one = not any(name.startswith("model.") for name in study.fields)
    return "" if study.size is None or not is_one else f" (D = {study.size[0]}, {study.size[1]} sites)"


def significance_table(comparisons: Sequence[Comparison]) -> Table:
    rows = []
    for one in comparisons:
        paired = one.paired
        rows.append(
            {
                "against": one.against,
                "streams": one.streams,
                "method": one.label,
                **one.settings,
                "pairs": paired.pairs if paired else 0,
                "difference": paired.mean if paired else None,
                "low": paired.low if paired else None,
                "high": paired.high if paired else None,
                "p": paired.p if paired else None,
                "p_holm": one.p_holm,
                "verdict": one.verdict,
            }
        )
    fields = dict.fromkeys(name for one in comparisons for name in one.settings)
    columns = (
        Column("method", lambda row: row["method"], "method", is_text=True),
        Column("N", lambda row: str(row["streams"]), "streams"),
        *vary_columns(fields),
        Column("against", lambda row: row["against"], "against", is_text=True),
        Column("difference in bpb", lambda row: decimal(row["difference"], sign=True), "difference"),
        Column("95% interval", _interval, "low"),
        Column("pairs", lambda row: str(row["pairs"]), "pairs"),
        Column("p", lambda row: decimal(row["p"]), "p"),
        Column("p, corrected", lambda row: decimal(row["p_holm"]), "p_holm"),
        Column(
            "verdict", lambda row: row["verdict"], "verdict", lambda row: row["verdict"] in ("better", "worse"), True
        ),
    )
    note = (
        "Differences of bpb, paired by seed; below 0 is better. Corrected by Holm for all with that baseline at that N"
        f"{' and these settings' if fields else ''}."
    )
    return Table("significance", "Differences over seeds", tuple(rows), columns, note)


def _interval(row: Row) -> str:
    return DASH if row["low"] is None else f"{row['low']:+.4f} .. {row['high']:+.4f}"


def cost_table(study: Study) -> Table | None:
    """The interleaved measurement; None if there is none."""
    cost = study.raw.get("cost")
    entries = [row for row in (cost or {}).get("rows") or [] if row and isinstance(row.get("streams"), int)]
    if not entries:
        return None
    label_of = {run.method: run.label for run in study.runs}
    rows = []
    for entry in entries:
        method = str(entry.get("method"))
        row: dict[str, Any] = {"method": label_of.get(method, method), "streams": entry["streams"]}
        for name in ("step_ms", "ratio"):
            measured = entry[name] if isinstance(entry.get(name), Mapping) else {}
            row |= {f"{name}_{part}": number(measured.get(part)) for part in ("median", "low", "high")}
        rows.append(row)
    columns = (
        Column("method", lambda row: row["method"], "method", is_text=True),
        Column("N", lambda row: str(row["streams"]), "streams"),
        Column("step, ms", lambda row: _quartiles(row, "step_ms", 1), "step_ms_median"),
        Column("time, residual = 1", lambda row: _quartiles(row, "ratio", 3), "ratio_median"),
    )
    note = "Median and quartiles of interleaved rounds in one process: forward, backward and optimizer step."
    return Table("cost", "Cost of a training step", tuple(rows), columns, note)


def _quartiles(row: Row, name: str, digits: int) -> str:
    if row[f"{name}_median"] is None:
        return DASH
    low, high = (decimal(row[f"{name}_{part}"], digits) for part in ("low", "high"))
    return f"{row[f'{name}_median']:.{digits}f} ({low} .. {high})"


def runs_table(study: Study) -> Table:
    """What became of every run."""
    rows = [
        {
            "key": run.key,
            **study.values(run.vary, is_residual=run.is_residual),
            "status": run.status,
            "step": run.step,
            "steps": run.steps,
            "bpb": run.bpb,
            "added": run.added,
            "frozen": run.frozen,
            "total": run.total,
            "step_seconds": run.step_seconds,
            "reason": why(run),
        }
        for run in study.runs
    ]
    columns = (
        Column("run", lambda row: row["key"], "key", is_text=True),
        *vary_columns(study.fields),
        Column("status", lambda row: row["status"], "status", lambda row: row["status"] != "finished", True),
        Column("step", lambda row: f"{whole(row['step'])} of {whole(row['steps'])}", "step"),
        Column("bpb", lambda row: decimal(row["bpb"]), "bpb"),
        Column("added parameters", lambda row: whole(row["added"]), "added"),
        Column("all parameters", lambda row: whole(row["total"]), "total"),
        Column("s a step", lambda row: decimal(row["step_seconds"], 3), "step_seconds"),
        Column("reason", lambda row: row["reason"] or DASH, "reason", is_text=True),
    )
    note = "Seconds a step are the median of the run itself, at whatever time and beside whatever else it ran."
    return Table("runs", "Runs", tuple(rows), columns, note)


def why(run: Run) -> str | None:
    """The reason of a run that has no number."""
    if run.reason is None and run.is_finished and run.bpb is None:
        return "finished without a finite bpb: it is in no mean and no comparison"
    return run.reason


def curves_table(study: Study) -> Table:
    """The bpb curves as data: mean and standard deviation over seeds."""
    rows = []
    for n, variant in itertools.product(study.streams, study.variants):
        for label in variant.labels_at(n):
            series = average([run.val for run in variant.measured(label, n).values()])
            if series is not None:
                sds = series.sds or [None] * len(series.steps)
                for step, centre, sd_ in zip(series.steps, series.means, sds, strict=True):
                    row = {"method": label, "streams": n, **variant.here, "seeds": series.seeds, "step": step}
                    rows.append(row | {"bpb": centre, "bpb_sd": sd_})
    return Table("curves", "Validation bpb", tuple(rows))
