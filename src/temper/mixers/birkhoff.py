"""A mixture of all permutation matrices: exactly doubly stochastic (the mixing of mHC-lite)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from temper.mixers.base import Mixer
from temper.ops.plan import MixerSpec

MAX_STREAMS = 6


class Birkhoff(Mixer, name="birkhoff"):
    """res = sum_p softmax(logits)[p] P_p over the N! permutations, in the order of `itertools.permutations`.

    P_p[i, p[i]] = 1; the identity comes first.

    Reference: Birkhoff, 1946; Yang et al., mHC-lite, 2026.
    """

    row_stochastic = "exact"
    column_stochastic = "exact"

    def __init__(self, num_streams: int) -> None:
        super().__init__(num_streams)
        self.mixture = PermutationMixture(num_streams)

    @classmethod
    def logit_shape_for(cls, num_streams: int) -> tuple[int, ...]:
        return (math.factorial(num_streams),)

    @classmethod
    def refusal(cls, num_streams: int) -> str | None:
        if num_streams <= MAX_STREAMS:
            return None
        return (
            f"birkhoff mixes all N! permutations, {math.factorial(num_streams):,} at N={num_streams}; "
            f"the most it is built for is N={MAX_STREAMS}. The kronecker and sinkhorn mixers take any N."
        )

    @classmethod
    def flops(cls, num_streams: int, **options: Any) -> int:
        return mixture_flops(num_streams)

    @classmethod
    def saved(cls, num_streams: int, **options: Any) -> int:
        return math.factorial(num_streams)

    def initial_bias(self) -> Tensor:
        return identity_bias(num_streams=self.num_streams)

    def mix(self, logits: Tensor) -> Tensor:
        res: Tensor = self.mixture(logits)
        return res

    def vjp(self, logits: Tensor, res: Tensor, grad: Tensor) -> Tensor:
        return self.mixture.vjp(logits, grad)

    def lipschitz(self) -> float:
        # Two permutations that share no place, half of each: sqrt(2N) apart, and softmax gives sqrt(1/8) of it.
        return self.num_streams**0.5 / 2

    def native(self) -> MixerSpec:
        return MixerSpec("permutations", factors=(self.num_streams,))


class PermutationMixture(nn.Module):
    """softmax(logits)-weighted sum of the permutation matrices of `size` things."""

    permutations: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.register_buffer("permutations", torch.empty(math.factorial(size), size, size), persistent=False)
        self._fill()

    def _fill(self) -> None:
        if not self.permutations.is_meta:
            index = torch.tensor(list(itertools.permutations(range(self.size))), device=self.permutations.device)
            with torch.no_grad():
                self.permutations.zero_().scatter_(-1, index.unsqueeze(-1), 1)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        # A constant that no checkpoint holds: rewritten after every move, because to_empty from the meta device
        # leaves garbage.
        super()._apply(fn, recurse)
        self._fill()
        return self

    def forward(self, logits: Tensor) -> Tensor:
        weights = logits.softmax(-1)
        return torch.tensordot(weights, self.permutations.to(weights.dtype), dims=1)

    def vjp(self, logits: Tensor, grad: Tensor) -> Tensor:
        """The gradient of the logits from that of the matrix."""
        weights = logits.softmax(-1)
        slope = torch.tensordot(grad, self.permutations.to(grad.dtype), dims=([-2, -1], [1, 2]))
        return weights * (slope - (weights * slope).sum(-1, keepdim=True))


def identity_bias(num_streams: int) -> Tensor:
    """0 at the identity permutation, -8 elsewhere."""
    bias = torch.full((math.factorial(num_streams),), -8.0)
    bias[0] = 0.0
    return bias


def mixture_flops(size: int) -> int:
    """Softmax (shift, exp, add, divide) and the weighted sum."""
    return math.factorial(size) * (4 + 2 * size**2)
