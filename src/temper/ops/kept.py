"""Streams that are made again instead of kept.

Of a group of sites only the first streams are kept. Every branch output is kept anyway, and so is the routing of
every token, which is small: from these the later streams follow by mixing and writing alone, without running a
branch again.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from temper.ops.plan import Plan

# Where streams carry how they were made.
_MARK = "_temper_source"


class Kept:
    """One site's place in its group: how its streams follow from what autograd keeps. Has no tensors of its own."""

    def __init__(self, group: int, before: Kept | None = None, step: tuple[Plan, ModuleType] | None = None) -> None:
        self.group, self.before, self.step = group, before, step
        self.place: int = 0 if before is None else before.place + 1
        self._again: Tensor | None = None

    def streams(self, first: Tensor, *steps: Tensor) -> Tensor:
        """The streams (T, N, D); all of the group up to here is held until it is dropped.

        Args:
            first: the streams that the group keeps.
            steps: y and the weights of every site from there to here.
        """
        if self.before is None or self.step is None:
            return first
        if self._again is None:
            value, (plan, implementation) = self.before.streams(first, *steps[:-2]), self.step
            with torch.no_grad():
                self._again = implementation.finish(value, *steps[-2:], plan)
        return self._again

    def drop(self) -> None:
        """Forgets what was made again."""
        self._again = None


class Source(NamedTuple):
    """How to make streams again, and from what: `first` and `steps` of `Kept.streams`, for autograd to keep.

    So they are freed after the backward pass, go to a checkpoint that asks for them, and are noticed if they change.
    """

    kept: Kept
    tensors: tuple[Tensor, ...]

    @classmethod
    def of(cls, streams: Tensor, tokens: Tensor, group: int) -> Source | None:
        """For the streams that a site was given, (T, N, D) as `tokens`; None if they are to be kept themselves."""
        # A compiled graph decides itself what it makes again.
        if not group or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return None
        source, version = getattr(streams, _MARK, (None, 0))
        # Streams that were changed in place are not what the site before made.
        if source is None or source.kept.group != group or version != streams._version:
            return cls(Kept(group), (tokens.detach(),))
        return source

    def lead_to(self, result: Tensor, y: Tensor, weights: Tensor, plan: Plan, implementation: ModuleType) -> None:
        """Marks the next streams as made from these, unless a new group begins there."""
        if self.kept.place + 1 < self.kept.group:
            kept = Kept(self.kept.group, self.kept, (plan, implementation))
            source = Source(kept, (*self.tensors, y.detach(), weights.detach()))
            setattr(result, _MARK, (source, result._version))
