"""How a study is run this time."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from temper_lab.recipe import Recipe


@dataclass(frozen=True)
class Session:
    """How a study is run this time, which changes none of its numbers.

    Args:
        jobs: runs at a time; 0 chooses.
        threads: of each run; 0 chooses.
        launch: the words before `-m`, such as torchrun's.
        with_cost: measure what a step of every method costs.
        bundle: of CORE, for which finished runs are evaluated.
    """

    jobs: int = 0
    threads: int = 0
    launch: tuple[str, ...] = ()
    with_cost: bool = True
    bundle: Path | None = None
    max_per_task: int | None = None

    def settled(self, recipe: Recipe, num_runs: int) -> tuple[int, int]:
        """Jobs and threads; as many as there are cores for."""
        if self.launch or not is_on_cpu(recipe):
            # The launcher has all devices.
            return self.jobs or 1, self.threads
        cores = num_cores()
        jobs = self.jobs or max(1, min(num_runs, cores // (self.threads or 1)))
        return jobs, self.threads or max(1, cores // jobs)


def is_on_cpu(recipe: Recipe) -> bool:
    device = recipe.train.device
    return device == "cpu" or (device == "auto" and not torch.cuda.is_available())


def num_cores() -> int:
    """As many as this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
