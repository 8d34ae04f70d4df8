"""`temper gpu-check`: checks the GPU kernels on this GPU and times them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def gpu_check(out: Path = Path("gpu.json"), rounds: int = 20, tune: Path | None = None) -> int:
    """Check the Triton kernels on this GPU, then time them; takes some ten minutes and writes one file to send in.

    Every operation is compared with its definition in float64, outputs and gradients, and run twice for equal bits. If
    one is wrong nothing is timed, and the exit code is 1. Then every operation is timed with a cold cache, beside
    `fused` and compiled `fused`, and set against the bytes it has to move. docs/gpu.md says how to send the file in:

        temper gpu-check --out gpu.json
        temper gpu-check --tune tiles.json && TEMPER_TILES=tiles.json temper gpu-check

    Args:
        out: The report, as JSON.
        rounds: The number of times each operation is timed; medians are reported.
        tune: Try other tile sizes too, and write the fastest to this file for the variable TEMPER_TILES. Takes half an
            hour more, to compile some 1,200 kernels.
    """
    import torch

    from temper.ops import gpu
    from temper_lab.bench import gpu as measure
    from temper_lab.io import atomic_write

    if rounds < 1:
        raise ValueError(f"--rounds is {rounds}; expected a whole number >= 1")
    for path in (out, tune):
        if path is not None and path.is_dir():
            raise ValueError(f"cannot write to {path}: it is a folder")
    reason = gpu.unavailable() or gpu.too_old(torch.device("cuda"))
    if reason is not None:
        raise ValueError(
            f"nothing to check here: {reason}. Without a GPU, `temper bench --count` counts what the kernels would "
            "move, and the tests run them in Triton's interpreter and compile them (docs/gpu.md)"
        )

    def write(path: Path, content: dict[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, json.dumps(content, indent=1) + "\n")

    # What is right is written before anything is timed: whatever ends the process then, there is a file to send in.
    report = measure.report(rounds, keep=lambda found: write(out, found))
    write(out, report)
    measure.show(report)
    print(f"report: {out}")
    if tune is not None and report["is_right"]:
        write(tune, measure.tune(rounds))
        print(f"tiles: {tune}")
    return 0 if report["is_right"] else 1
