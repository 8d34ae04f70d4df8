"""`temper bench`: the cost of hyper-connections in time and memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import tyro

from temper_lab.bench import PARTS, Setting
from temper_lab.bench import bench as measure


def bench(
    methods: Annotated[list[str], tyro.conf.arg(metavar="METHOD")] = list(Setting.methods),  # noqa: B006 - tyro shows it in --help
    streams: Annotated[list[int], tyro.conf.arg(metavar="N")] = list(Setting.streams),  # noqa: B006
    growth: Annotated[list[int], tyro.conf.arg(metavar="N")] = list(Setting.growth),  # noqa: B006
    backends: list[str] = list(Setting.backends),  # noqa: B006
    width: int = Setting.width,
    tokens: int = Setting.tokens,
    rounds: int = Setting.rounds,
    threads: int = Setting.threads,
    parts: list[str] = list(PARTS),  # noqa: B006
    quick: bool = False,
    count: bool = False,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
    plot: Path | None = None,
    out: Path | None = None,
) -> None:
    """Measure the cost of hyper-connections against plain residual additions and other packages.

    Every backend's outputs and gradients are compared with `naive` first; a difference ends the command. Then all
    variants take turns in one process, round after round; medians and the middle half of the rounds are reported:

        temper bench
        temper bench --quick
        temper bench --parts pair growth --streams 4 8 --methods temper-cp mhc --plot bench.png
        temper bench --json --out bench.json
        temper bench --count --methods temper-cp mhc --streams 4 8

    Args:
        methods: Methods to measure: presets, or presets with overrides such as mhc:generator=cp:rank=8.
        streams: Numbers of streams N, for every part except growth.
        growth: Numbers of streams for the part growth.
        backends: Implementations to measure: cpu, fused, naive.
        width: Width D of the block pair; the model of the part step has about a third of it.
        tokens: Tokens of the block pair, in one sequence.
        rounds: Rounds in which every variant takes a turn, after two warm-up rounds; half as many for the part step.
        threads: Threads for torch and the native kernels.
        parts: What to measure: pair (attention + MLP, and one site), growth (one site against N), step (the lab's
            model), recompute (memory of a deep stack), sinkhorn (the mixer alone).
        quick: Measure less of everything, in about a minute, to see whether it works. Not for numbers to quote.
        count: Measure nothing: count the bytes and launches of a site by method, N and backend, and estimate from data
            sheets what they cost on GPUs. Needs no GPU.
        as_json: Print JSON instead of tables.
        plot: Write the figure of overheads and growth to this .png, .svg or .pdf file.
        out: Write the JSON to this file too.
    """
    if count:
        _count(methods, streams, as_json, plot, out)
        return
    setting = Setting(
        methods=tuple(methods),
        streams=tuple(streams),
        growth=tuple(growth),
        backends=tuple(backends),
        width=width,
        tokens=tokens,
        rounds=rounds,
        threads=threads,
        parts=tuple(word for part in parts for word in part.split(",") if word),
    )
    if quick:
        setting = setting.quick()
    _check_targets(setting, plot, out)
    report = measure(setting)
    from temper_lab.io import atomic_files

    with atomic_files(*(path for path in (out, plot) if path is not None)) as files:
        if out is not None:
            files[0].write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        if plot is not None:
            from temper_lab.report.plots_bench import draw

            draw(report, files[-1])
    if as_json:
        print(json.dumps(report, indent=2))
        return
    from temper_lab.bench.benchmark import show
    from temper_lab.console import console

    show(report, console(240))
    for name, path in (("json", out), ("figure", plot)):
        if path is not None:
            print(f"{name}: {path}")


def _count(methods: list[str], streams: list[int], as_json: bool, plot: Path | None, out: Path | None) -> None:
    """Counts bytes and launches, and estimates their cost."""
    from temper_lab.bench import count

    if plot is not None:
        raise ValueError("--count draws no figure: leave --plot out")
    if out is not None and out.is_dir():
        raise ValueError(f"cannot write JSON to {out}: it is a folder")
    found, skipped = count.rows(methods, streams)
    text = json.dumps({"tokens": count.TOKENS, "rows": found, "skipped": skipped}, indent=2)
    if out is not None:
        from temper_lab.io import atomic_write

        atomic_write(out, text + "\n")
    print(text if as_json else count.tables(found))
    if skipped and not as_json:
        print("", *(f"not counted: {line}" for line in count.left_out(skipped)), sep="\n")


def _check_targets(setting: Setting, plot: Path | None, out: Path | None) -> None:
    """Raises ValueError if an output could not be written, before minutes are spent on it."""
    if plot is not None:
        from temper_lab.report.plots_mpl import check_target

        check_target(plot)
        if not {"pair", "growth"} & set(setting.parts):
            raise ValueError(f"--plot shows the parts pair and growth, and --parts is {' '.join(setting.parts)}")
    if out is not None and out.is_dir():
        raise ValueError(f"cannot write JSON to {out}: it is a folder")
