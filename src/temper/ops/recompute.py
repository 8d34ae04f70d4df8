"""Streams that are recomputed in the backward pass instead of being saved for it.

Only the first streams of a group of sites are saved. Every branch output is saved anyway, and so is the routing of
every token, which is small: from these the later streams follow by mixing and writing alone, without running a
branch again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from temper.ops.plan import SiteSpec, tokens_of

if TYPE_CHECKING:
    from temper.ops.backend import Kernels

# The attribute in which streams carry their origin, and their version at that time.
_MARK = "_temper_origin"


class Segment:
    """One site's place in its group, and how to recompute its streams from saved tensors. Owns no tensors.

    Args:
        group: how many sites share one set of saved streams.
        before: the place of the site before, None at the first of the group.
        step: the spec and the kernels that made these streams from those before.
    """

    def __init__(self, group: int, before: Segment | None = None, step: tuple[SiteSpec, Kernels] | None = None) -> None:
        self.group, self.before, self.step = group, before, step
        self.place: int = 0 if before is None else before.place + 1
        self._recomputed: Tensor | None = None

    def streams(self, first: Tensor, *steps: Tensor) -> Tensor:
        """The streams; those recomputed on the way stay in memory until they are dropped.

        Args:
            first: the saved streams of the group.
            steps: y and the routing weights of every site from there to here.
        """
        if self.before is None or self.step is None:
            return first
        if self._recomputed is None:
            (spec, kernels), (*earlier, y, weights) = self.step, steps
            streams = tokens_of(self.before.streams(first, *earlier))
            with torch.no_grad():
                self._recomputed = kernels.finish(streams, y.reshape(len(weights), spec.dim), weights, spec)
        return self._recomputed

    def drop(self) -> None:
        """Frees the streams recomputed for this site."""
        self._recomputed = None


class Origin(NamedTuple):
    """The tensors from which streams are recomputed: `first` and `steps` of `Segment.streams`.

    Autograd saves these tensors, so they are freed after the backward pass, checkpoints see them, and a change in place
    is noticed.
    """

    segment: Segment
    tensors: tuple[Tensor, ...]

    @classmethod
    def of(cls, streams: Tensor, group: int) -> Origin | None:
        """The origin of the streams that a site was given; None if the streams themselves are saved, the default."""
        # A compiled graph decides itself what to recompute.
        if not group or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return None
        origin, version = getattr(streams, _MARK, (None, 0))
        # Streams changed in place are no longer the output of the previous site.
        if origin is None or origin.segment.group != group or version != streams._version:
            return cls(Segment(group), (streams.detach().contiguous(),))
        return origin

    def following(self, y: Tensor, weights: Tensor, spec: SiteSpec, kernels: Kernels) -> Origin | None:
        """The origin of the streams computed from these; None if a new group begins there."""
        if self.segment.place + 1 >= self.segment.group:
            return None
        segment = Segment(self.segment.group, self.segment, (spec, kernels))
        return Origin(segment, (*self.tensors, y.detach(), weights.detach()))

    def mark(self, streams: Tensor) -> None:
        """Attaches this origin to streams, for the next site."""
        setattr(streams, _MARK, (self, streams._version))
