"""A Kronecker product of small permutation mixtures: exactly doubly stochastic (the mixing of KromHC)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from temper.mixers.base import Mixer
from temper.mixers.birkhoff import PermutationMixture, identity_bias, mixture_flops

# 7! = 5,040 logits are still a matrix one can hold; 11! = 39,916,800 are not.
MAX_FACTOR = 7


class Kronecker(Mixer, name="kronecker"):
    """res = U^K (x) .. (x) U^1, each U^k a Birkhoff mixture of its i_k! permutations.

    i_1 <= .. <= i_K are the prime factors of N, so N = 12 is written 3 x 2 x 2 and N = 7 is one
    factor. The logits of U^1, .., U^K are concatenated in this order.

    Reference: Zhou et al., KromHC, 2026.
    """

    doubly_stochastic = "exactly"

    def __init__(self, num_streams: int) -> None:
        super().__init__(num_streams)
        self.sizes = prime_factors(num_streams)
        # Factors of one size share their table of permutations.
        self.mixtures = nn.ModuleDict({str(size): PermutationMixture(size) for size in set(self.sizes)})

    @classmethod
    def logit_shape_for(cls, num_streams: int) -> tuple[int, ...]:
        return (sum(math.factorial(size) for size in prime_factors(num_streams)),)

    @classmethod
    def refusal(cls, num_streams: int) -> str | None:
        largest = prime_factors(num_streams)[-1]
        if largest <= MAX_FACTOR:
            return None
        return (
            f"kronecker mixes the permutations of every prime factor of N={num_streams}, and "
            f"{largest}! = {math.factorial(largest):,} are too many: the largest prime factor it is built for "
            f"is {MAX_FACTOR}. The sinkhorn mixer takes any N."
        )

    @classmethod
    def flops(cls, num_streams: int, **options: Any) -> int:
        flops, size = 0, 1
        for factor in prime_factors(num_streams):
            size *= factor
            flops += mixture_flops(factor) + size**2
        return flops

    @classmethod
    def saved(cls, num_streams: int, **options: Any) -> int:
        # The weights of every factor, the factors, and the partial products.
        floats, size = 0, 1
        for factor in prime_factors(num_streams):
            floats += math.factorial(factor) + factor**2 + (size**2 if size > 1 else 0)
            size *= factor
        return floats

    def initial_bias(self) -> Tensor:
        return torch.cat([identity_bias(size) for size in self.sizes])

    def forward(self, logits: Tensor) -> Tensor:
        parts = logits.split([math.factorial(size) for size in self.sizes], dim=-1)
        res: Tensor | None = None
        for size, part in zip(self.sizes, parts, strict=True):
            factor = self.mixtures[str(size)](part)
            res = factor if res is None else _kronecker(factor, res)
        assert res is not None
        return res


def prime_factors(number: int) -> tuple[int, ...]:
    """The prime factors in ascending order; (1,) for 1."""
    factors, prime = [], 2
    while number > 1:
        while number % prime == 0:
            factors.append(prime)
            number //= prime
        prime += 1
    return tuple(factors) or (1,)


def _kronecker(left: Tensor, right: Tensor) -> Tensor:
    """(..., A, A) (x) (..., B, B) -> (..., AB, AB); torch.kron has no batch."""
    product = left[..., :, None, :, None] * right[..., None, :, None, :]
    return product.flatten(-4, -3).flatten(-2, -1)
