"""The identity: streams that are read and written but never mixed."""

from __future__ import annotations

import torch
from torch import Tensor

from temper.mixers.base import Growth, Mixer
from temper.ops.plan import MixerSpec


class Identity(Mixer, name="identity"):
    """res = I, from no logits at all: H'[m] = H[m] + post[m] y. Isolates the effect of reading and writing.

    A head without logits has no generator, gate or bias, so `res` adds no parameters.
    """

    row_stochastic = "exact"
    column_stochastic = "exact"

    @classmethod
    def logit_shape_for(cls, num_streams: int) -> tuple[int, ...]:
        return (0,)

    def initial_bias(self) -> Tensor:
        return torch.empty(0)

    def grow(self, bias: Tensor, copies: int) -> Growth:
        return Growth((torch.empty(0, 0, dtype=torch.float64),), bias)

    def mix(self, logits: Tensor) -> Tensor:
        # The sum of no logits is zero for every token; it ties res to the logits for autograd.
        eye = torch.eye(self.num_streams, dtype=logits.dtype, device=logits.device)
        return eye + logits.sum(-1)[..., None, None]

    def vjp(self, logits: Tensor, res: Tensor, grad: Tensor) -> Tensor:
        return torch.empty_like(logits)

    def lipschitz(self) -> float:
        return 0.0

    def native(self) -> MixerSpec:
        return MixerSpec("identity")
