"""Which code made a number, and on which machine."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import temper_lab
from temper_lab import run
from temper_lab.bench.machine import cpu_name
from temper_lab.compare.session import num_cores


@cache
def commit() -> str | None:
    """Of the source tree, with "+changes" if files of it were changed; None if it is no git checkout."""
    root = Path(temper_lab.__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:
        found = _git(root, "rev-parse", "HEAD").strip()
        return f"{found}+changes" if _git(root, "status", "--porcelain", "--untracked-files=no").strip() else found
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *words: str) -> str:
    return subprocess.run(
        ["git", "-C", str(root), *words], capture_output=True, text=True, check=True, timeout=30
    ).stdout


def versions() -> dict[str, Any]:
    """As a run has them, but for the number of threads, which is the machine's."""
    return {name: value for name, value in run.versions().items() if name != "threads"}


def machine() -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"cpu": cpu_name(), "cores": num_cores(), "memory_gb": round(memory / 2**30), "system": platform.platform()}
