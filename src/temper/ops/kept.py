"""Streams that are made again instead of kept.

Of a group of sites only the first streams are kept. Every branch output is kept anyway, and so is the routing of
every token, which is small: from these the later streams follow by mixing and writing alone, without running a
branch again.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from temper.ops.plan import Plan

# Where streams carry how they were made.
_MARK = "_temper_kept"


class Kept:
    """One site's streams: kept themselves, or as a step from the streams before them."""

    def __init__(self, group: int, place: int = 0) -> None:
        self.group, self.place = group, place
        self._tensor: Tensor | None = None
        self._step: tuple[Kept, Tensor, int, Tensor, Plan, ModuleType] | None = None

    @classmethod
    def of(cls, streams: Tensor, group: int) -> Kept | None:
        """How the streams that a site was given are kept; None if plainly, by autograd."""
        # A compiled graph decides itself what it makes again.
        if not group or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return None
        kept: Kept | None = getattr(streams, _MARK, None)
        if kept is None or kept.group != group:
            kept = cls(group)
        return kept

    def hold(self, tokens: Tensor) -> None:
        """Takes the streams (T, N, D), if these are to be kept."""
        if self.is_first:
            self._tensor = tokens.detach()

    @property
    def is_first(self) -> bool:
        """Whether these are the streams that a group keeps."""
        return self._step is None

    def lead_to(self, result: Tensor, y: Tensor, weights: Tensor, plan: Plan, implementation: ModuleType) -> None:
        """Marks the next streams as made from these."""
        kept = Kept(self.group, (self.place + 1) % self.group)
        if kept.place:
            kept._step = (self, y.detach(), y._version, weights.detach(), plan, implementation)
        setattr(result, _MARK, kept)

    def streams(self) -> Tensor:
        """The streams (T, N, D), made again if need be; all of the group up to here is held until it is dropped."""
        chain: list[Kept] = []
        kept = self
        while kept._tensor is None:
            assert kept._step is not None
            chain.append(kept)
            kept = kept._step[0]
        value = kept._tensor
        for kept in reversed(chain):
            assert kept._step is not None
            _, y, version, weights, plan, implementation = kept._step
            if y._version != version:
                raise RuntimeError(
                    "a branch output was changed in place after it was written to the streams, and `recompute` "
                    "needs it as it was: change a copy, or turn recompute off"
                )
            with torch.no_grad():
                value = kept._tensor = implementation.finish(value, y, weights, plan)
        return value

    def drop(self) -> None:
        """Forgets what was made again."""
        if not self.is_first:
            self._tensor = None
