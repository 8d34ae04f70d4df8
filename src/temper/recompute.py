"""Less memory for the streams of a model, at the price of mixing again."""

from __future__ import annotations

import math
from typing import TypeVar

from torch import nn

from temper.connection import HyperConnection

Model = TypeVar("Model", bound=nn.Module)


def best_group(num_streams: int, sites: int) -> int:
    """The group size with the least memory: sqrt(N L / (N + 2)), rounded up.

    L sites in groups of g keep N L / g streams, and while a group runs backwards it holds about (N + 2) g more.
    """
    return max(1, math.ceil(math.sqrt(num_streams * sites / (num_streams + 2))))


def recompute(model: Model, group: int | None = None) -> Model:
    """Has the hyper-connections of a model keep fewer streams for the backward pass, at the price of mixing again.

    The gradients are the same. Branches do not run again, so this goes together with activation
    checkpointing or without it. A compiled model decides for itself what to make again and is not touched by this.

    Args:
        model: any module with `HyperConnection`s in it.
        group: of so many sites in a row only the first streams are kept; by default sqrt(N L / (N + 2)) for L sites,
            which takes the least memory; 0 turns it off.

    Returns:
        The same model.
    """
    sites = [site for site in model.modules() if isinstance(site, HyperConnection)]
    if not sites:
        raise ValueError(f"{type(model).__name__} has no HyperConnection")
    if group is None:
        group = best_group(sites[0].config.num_streams, len(sites))
    if isinstance(group, bool) or not isinstance(group, int) or group < 0:
        raise ValueError(f"group is {group!r}; expected a whole number >= 0, or None for the best")
    for site in sites:
        site.recompute = group
    return model
