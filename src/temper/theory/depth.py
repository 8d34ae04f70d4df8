"""Accumulation of the deviations of many sites through a network.

One network runs H_{l+1} = F_l(H_l), the other Ht_{l+1} = Ft_l(Ht_l), both from the same H_0. Since
Ht_{l+1} - H_{l+1} = (Ft_l(Ht_l) - Ft_l(H_l)) + (Ft_l(H_l) - F_l(H_l)), their distance e_l obeys

    e_{l+1} <= growth_l e_l + delta_l

with delta_l the deviation of site l on the streams of the first network, which Theorem 2 bounds, and growth_l the
ratio ||Ft_l(Ht_l) - Ft_l(H_l)|| / ||Ht_l - H_l|| measured on these very streams. Norms are of all tokens together,
because attention mixes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from temper.connection import HyperConnection
from temper.theory.deviation import Branch, Deviation, compare
from temper.theory.view import widened

Step = tuple[HyperConnection, HyperConnection, Branch]


@dataclass(frozen=True)
class Depth:
    """Two networks after one more site.

    Args:
        streams: of the first network, before this site; float64.
        deviation: of this site alone, on the streams of the first network.
        growth: the factor by which this site of the second network amplifies earlier deviations.
        measured: ||H - Ht|| of all tokens together.
        bound: the bound from the recursion with Theorem 2's bounds.
        size: ||H|| of the first network.
    """

    streams: Tensor
    deviation: Deviation
    growth: float
    measured: float
    bound: float
    size: float

    @property
    def exceeded(self) -> list[str]:
        """The bounds that do not hold; there should be none."""
        # Adding up numbers of this size rounds too.
        holds = self.measured <= self.bound * (1 + 1e-12)
        return [*self.deviation.exceeded, *([] if holds else ["whole model"])]


def through_depth(steps: Iterable[Step], streams: Tensor) -> Iterator[Depth]:
    """Runs two networks side by side from the same streams (..., N, D), and compares them after every site.

    Args:
        steps: a site of each network and the branch that they share, in the order in which they run.
    """
    # In float64 between the sites: rounding there would be a deviation of its own.
    mine = theirs = streams.detach().double()
    bound = 0.0
    for site, other, branch in steps:
        run = _in_dtype(branch, streams.dtype)
        before = (theirs - mine).norm().item()
        deviation, following, theirs_on_mine = compare(site, other, mine, run)
        assert deviation.block is not None
        assert following is not None
        assert theirs_on_mine is not None
        wide = widened(other)
        with torch.no_grad():
            x, state = wide.begin(theirs)
            theirs = wide.finish(state, run(x))
        growth = (theirs - theirs_on_mine).norm().item() / before if before else 0.0
        bound = growth * bound + deviation.block.bound_total
        before_site, mine = mine, following
        yield Depth(before_site, deviation, growth, (theirs - mine).norm().item(), bound, mine.norm().item())


def _in_dtype(branch: Branch, dtype: torch.dtype) -> Branch:
    return lambda x: branch(x.to(dtype)).double()
