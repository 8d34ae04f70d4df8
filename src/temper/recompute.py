"""Saves fewer streams for the backward pass and recomputes the rest."""

from __future__ import annotations

import math
from typing import TypeVar

from torch import nn

from temper.connection import HyperConnection
from temper.registry import check_int

Model = TypeVar("Model", bound=nn.Module)


def best_group(num_streams: int, sites: int) -> int:
    """The group size with the least memory: sqrt(N L / (N + 2)), rounded up.

    L sites in groups of g save N L / g streams, and the backward pass of a group holds about (N + 2) g more.
    """
    return max(1, math.ceil(math.sqrt(num_streams * sites / (num_streams + 2))))


def recompute(model: Model, group: int | None = None) -> Model:
    """Makes the hyper-connections of a model save fewer streams for the backward pass and recompute the rest.

    The gradients are the same. Branches do not run again, so this works with activation checkpointing and without
    it. A compiled model decides by itself what to recompute and ignores this.

    Args:
        model: any module with `HyperConnection`s in it.
        group: save the streams of one site in `group`; by default sqrt(N L / (N + 2)) for L sites, which takes the
            least memory; 0 saves all.

    Returns:
        The same model.
    """
    sites = [site for site in model.modules() if isinstance(site, HyperConnection)]
    if not sites:
        raise ValueError(f"{type(model).__name__} has no HyperConnection")
    if group is None:
        group = best_group(sites[0].config.num_streams, len(sites))
    check_int("group", group, expected="a whole number >= 0, or None for the best")
    for site in sites:
        site.recompute = group
    return model
