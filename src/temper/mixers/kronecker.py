"""A Kronecker product of small permutation mixtures: exactly doubly stochastic (the mixing of KromHC)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from temper.mixers.base import Growth, Mixer
from temper.mixers.birkhoff import PermutationMixture, identity_bias, mixture_flops
from temper.ops.plan import MixerSpec

# 7! = 5,040 logits are still a feasible matrix; 11! = 39,916,800 are not.
MAX_FACTOR = 7


class Kronecker(Mixer, name="kronecker"):
    """res = U^K (x) .. (x) U^1, each U^k a Birkhoff mixture of its i_k! permutations.

    i_1 <= .. <= i_K are the prime factors of N, so N = 12 is written 3 x 2 x 2 and N = 7 is one
    factor. The logits of U^1, .., U^K are concatenated in this order.

    Reference: Zhou et al., KromHC, 2026.
    """

    row_stochastic = "exact"
    column_stochastic = "exact"

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

    def grow(self, bias: Tensor, copies: int) -> Growth:
        # Further factors stand on the left, where they mix the copies among themselves: U^K+1 (x) res.
        added = prime_factors(copies)
        if added[0] < self.sizes[-1]:
            raise ValueError(
                f"kronecker does not grow from {self.num_streams} to {copies * self.num_streams} streams: its factors "
                f"stand in ascending order, and {added[0]} would come before {self.sizes[-1]}"
            )
        bias = torch.cat([bias, *(identity_bias(size).to(bias) for size in added)])
        return Growth((torch.eye(len(bias), *self.logit_shape, dtype=torch.float64),), bias)

    def mix(self, logits: Tensor) -> Tensor:
        return self._products(self._factors(logits))[-1]

    def vjp(self, logits: Tensor, res: Tensor, grad: Tensor) -> Tensor:
        factors = self._factors(logits)
        products = self._products(factors)
        slopes: list[Tensor] = []
        for k in range(len(factors) - 1, -1, -1):
            outer, inner = self.sizes[k], math.prod(self.sizes[:k])
            # (A, A) of the factor and (B, B) of what it multiplies, apart.
            blocks = grad.unflatten(-1, (outer, inner)).unflatten(-3, (outer, inner))
            slopes.append(torch.einsum("...iajb,...ab->...ij", blocks, products[k - 1]) if k else grad)
            grad = torch.einsum("...iajb,...ij->...ab", blocks, factors[k])
        parts = self._parts(logits)
        gradients = []
        for size, part, slope in zip(self.sizes, parts, reversed(slopes), strict=True):
            mixture = self.mixtures[str(size)]
            assert isinstance(mixture, PermutationMixture)
            gradients.append(mixture.vjp(part, slope))
        return torch.cat(gradients, dim=-1)

    def lipschitz(self) -> float:
        # A mixture of permutations whose logits are sums: as for all N! of them.
        return self.num_streams**0.5 / 2

    def native(self) -> MixerSpec:
        return MixerSpec("permutations", factors=self.sizes)

    def _parts(self, logits: Tensor) -> tuple[Tensor, ...]:
        return logits.split([math.factorial(size) for size in self.sizes], dim=-1)

    def _factors(self, logits: Tensor) -> list[Tensor]:
        parts = self._parts(logits)
        return [self.mixtures[str(size)](part) for size, part in zip(self.sizes, parts, strict=True)]

    @staticmethod
    def _products(factors: list[Tensor]) -> list[Tensor]:
        """U^1, U^2 (x) U^1, .., all of them."""
        products = factors[:1]
        for factor in factors[1:]:
            products.append(_kronecker(factor, products[-1]))
        return products


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
