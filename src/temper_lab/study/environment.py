"""The environment of a study: commit, versions, machine, jobs and threads."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

import temper_lab
from temper_lab.bench.measure import cpu_name
from temper_lab.recipe import Recipe
from temper_lab.train import run_dir


@cache
def commit() -> str | None:
    """The commit of the source tree, with "+changes" if files differ from it; None outside a git checkout."""
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
    """The versions that a run records, without its number of threads."""
    return {name: value for name, value in run_dir.versions().items() if name != "threads"}


def machine() -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"cpu": cpu_name(), "cores": num_cores(), "memory_gb": round(memory / 2**30), "system": platform.platform()}


@dataclass(frozen=True)
class ExecutionOptions:
    """Options of one execution of a study, which change none of its numbers.

    Args:
        jobs: the number of runs at a time; 0 chooses it.
        threads: the threads of each run; 0 chooses them.
        launch: the words before `-m`, such as torchrun's.
        with_cost: measure the cost of a step of every method.
        bundle: the CORE bundle on which finished runs are evaluated.
        known: results.json of other machines or earlier studies, whose finished runs are taken over.
    """

    jobs: int = 0
    threads: int = 0
    launch: tuple[str, ...] = ()
    with_cost: bool = True
    bundle: Path | None = None
    max_per_task: int | None = None
    known: tuple[Path, ...] = ()

    def settled(self, recipe: Recipe, num_runs: int) -> tuple[int, int]:
        """The numbers of jobs and threads, chosen to fit the cores."""
        if self.launch or not is_on_cpu(recipe):
            # One run at a time, because the launcher uses all devices.
            return self.jobs or 1, self.threads
        cores = num_cores()
        jobs = self.jobs or max(1, min(num_runs, cores // (self.threads or 1)))
        return jobs, self.threads or max(1, cores // jobs)


def is_on_cpu(recipe: Recipe) -> bool:
    device = recipe.train.device
    return device == "cpu" or (device == "auto" and not torch.cuda.is_available())


def num_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
