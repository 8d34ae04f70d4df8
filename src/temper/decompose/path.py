"""Paths of ranks from the smallest to full, each step reducing the error most per parameter."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Ranks = tuple[int, ...]


def greedy(
    limits: Sequence[int],
    parameters: Callable[[Ranks], int],
    error: Callable[[Ranks], float],
    useful: Callable[[Ranks], bool],
) -> list[tuple[Ranks, float]]:
    """From rank one to the limits: each time the modes grow by one that lower the error most per parameter.

    Args:
        useful: whether ranks are worth considering; the other modes may limit one.
    """
    full = tuple(limits)
    rank = (1,) * len(full)
    path = [(rank, error(rank))]
    # Some modes can only grow together, so every subset is a candidate.
    moves = [move for move in itertools.product((0, 1), repeat=len(full)) if any(move)]
    while rank != full:
        grown = [tuple(r + up for r, up in zip(rank, move, strict=True)) for move in moves]
        grown = [r for r in grown if all(a <= b for a, b in zip(r, full, strict=True)) and useful(r)]
        here, cost = path[-1][1], parameters(rank)
        rank = max(grown, key=lambda r: ((here - error(r)) / (parameters(r) - cost), -parameters(r)), default=full)
        path.append((rank, error(rank)))
    return path


def tails(matrix: Tensor) -> list[float]:
    """The squared norm without the k largest singular values, for k = 0, 1, .."""
    return tails_of(torch.linalg.svdvals(matrix))


def tails_of(scales: Tensor) -> list[float]:
    left = scales.square().flip(0).cumsum(0).flip(0)
    return [*left.tolist(), 0.0]


def numerical_rank(matrix: Tensor) -> int:
    """Singular values above rounding, at least one."""
    scales = torch.linalg.svdvals(matrix)
    return max(1, int((scales > 1e-12 * scales[0]).sum()))


def slopes(path: Sequence[tuple[int, float]]) -> list[float]:
    """For (parameters, error) along a path: the error saved per parameter by each step, evened out to fall.

    A step that buys nothing by itself but opens the way to one that does shares the slope of both: the lower
    convex hull of the path.
    """
    found: list[float] = []
    at = 0
    while at < len(path) - 1:
        rates = [(path[at][1] - e) / (p - path[at][0]) for p, e in path[at + 1 :]]
        steepest = max(rates)
        # Ties go to the farthest, so that slopes strictly decrease.
        ahead = max(k for k, rate in enumerate(rates) if rate == steepest) + 1
        found += [steepest] * ahead
        at += ahead
    return found
