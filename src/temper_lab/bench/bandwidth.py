"""How fast this machine moves memory, and what a site has to move."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import torch

from temper_lab.bench.measure import Run

# Larger than any cache.
COPIED = 256 * 2**20
FLOAT = 4


def copy_run() -> Run:
    """Copies a buffer that no cache holds."""
    source, target = torch.ones(COPIED // FLOAT), torch.empty(COPIED // FLOAT)
    return Run(lambda: target.copy_(source))


def bandwidth(seconds: Sequence[float]) -> float:
    """Bytes per second of `copy_run`, reading and writing counted."""
    return 2 * COPIED / median(seconds)


def site_bytes(num_streams: int, width: int, tokens: int) -> int:
    """The least that a site moves, forward and backward: 8 N D + 5 D floats a token.

    Forward it reads H and writes x, then reads H and y and writes H'; backward it reads the gradient, H and y and
    writes that of y, then reads the gradient, H and that of x and writes that of H.
    """
    return (8 * num_streams + 5) * width * tokens * FLOAT
