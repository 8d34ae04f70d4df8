"""Where and with what a benchmark ran."""

from __future__ import annotations

import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import temper
from temper_lab.bench import peers
from temper_lab.bench.measure import WARMUP
from temper_lab.bench.setting import Setting


def describe(setting: Setting, keeps_freed_memory: bool) -> dict[str, Any]:
    """The setting of a report: sizes, versions and machine."""
    return {
        **{name: list(value) if isinstance(value, tuple) else value for name, value in asdict(setting).items()},
        "warmup_rounds": WARMUP,
        "times": "forward + backward, float32",
        "cpu": cpu_name(),
        "versions": {
            "temper": temper.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            peers.PACKAGE: peers.find()[0],
        },
        "keeps_freed_memory": keeps_freed_memory,
        "bandwidth_gb_s": None,
    }


def cpu_name() -> str:
    """As the system calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, None) or platform.processor() or platform.machine()
