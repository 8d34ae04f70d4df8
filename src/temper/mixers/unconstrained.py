"""The logits themselves: the mixing of the original HC."""

from __future__ import annotations

import torch
from torch import Tensor

from temper.mixers.base import Mixer


class Unconstrained(Mixer, name="unconstrained"):
    """res = logits; starts at the identity and promises nothing."""

    @classmethod
    def logit_shape_for(cls, num_streams: int) -> tuple[int, ...]:
        return (num_streams, num_streams)

    def initial_bias(self) -> Tensor:
        return torch.eye(self.num_streams)

    def forward(self, logits: Tensor) -> Tensor:
        return logits
