"""The logits themselves: the mixing of the original HC."""

from __future__ import annotations

import torch
from torch import Tensor

from temper.mixers.base import Growth, Mixer, copy_map
from temper.ops.plan import MixerSpec


class Unconstrained(Mixer, name="unconstrained"):
    """res = logits; starts at the identity, without any constraint."""

    @classmethod
    def logit_shape_for(cls, num_streams: int) -> tuple[int, ...]:
        return (num_streams, num_streams)

    def initial_bias(self) -> Tensor:
        return torch.eye(self.num_streams)

    def grow(self, bias: Tensor, copies: int) -> Growth:
        # Copies share the weight of the stream they copy.
        repeat = copy_map(self.num_streams, copies)
        return Growth((repeat, repeat), torch.kron(torch.eye(copies).to(bias), bias), gate=1 / copies)

    def mix(self, logits: Tensor) -> Tensor:
        return logits

    def forward_fast(self, logits: Tensor) -> Tensor:
        # An operator may not return its input.
        return logits.clone()

    def vjp(self, logits: Tensor, res: Tensor, grad: Tensor) -> Tensor:
        return grad

    def lipschitz(self) -> float:
        return 1.0

    def native(self) -> MixerSpec:
        return MixerSpec("copy")
