"""CP: W as a sum of R rank-one tensors (paper, TEMPER-CP)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from temper.generators.base import (
    Generator,
    Modes,
    Rank,
    Shapes,
    check_rank,
    fill_columns,
    fraction_of,
    mode_product,
)


class CP(Generator, name="cp"):
    """W[n, d, o..] = sum_q u[n, q] c[d, q] v[o, q].. ; one factor (mode, R) per mode."""

    ranked = True

    def __init__(self, in_modes: Modes, out_modes: Modes, *, rank: Rank = None, init_std: float | None = None) -> None:
        super().__init__(in_modes, out_modes, init_std=init_std)
        self.rank = self.resolve_rank(self.in_modes, self.out_modes, rank)
        shapes = self.shapes(self.in_modes, self.out_modes, rank=self.rank)
        self.factors = nn.ParameterList(torch.empty(shape) for shape in shapes.values())
        self.reset_parameters()

    @classmethod
    def resolve_rank(cls, in_modes: Modes, out_modes: Modes, rank: Rank) -> int:
        """One whole number. CP rank may exceed every mode; more terms than entries would be absurd."""
        modes = in_modes + out_modes
        if rank is None:
            return max(1, in_modes[0] // 2)
        if isinstance(rank, float):
            return max(1, fraction_of(cls.name, rank, modes) // sum(modes))
        if isinstance(rank, tuple):
            if len(rank) != len(modes) or len(set(rank)) != 1:
                raise ValueError(f"cp rank {rank} for modes {modes}: expected one number, the same for every mode")
            rank = rank[0]
        return check_rank(cls.name, f"modes {modes}", rank, math.prod(modes))

    @classmethod
    def shapes(cls, in_modes: Modes, out_modes: Modes, **options: Any) -> Shapes:
        rank = cls.resolve_rank(in_modes, out_modes, options.get("rank"))
        return {f"factors.{k}": (mode, rank) for k, mode in enumerate(in_modes + out_modes)}

    @classmethod
    def bottleneck(cls, in_modes: Modes, out_modes: Modes, **options: Any) -> int:
        return cls.resolve_rank(in_modes, out_modes, options.get("rank"))

    @classmethod
    def fold_flops(cls, in_modes: Modes, out_modes: Modes, **options: Any) -> int:
        # One product per entry of in_map, and one per entry of every partial out_map.
        entries = math.prod(in_modes) + sum(math.prod(out_modes[:k]) for k in range(2, len(out_modes) + 1))
        return entries * cls.bottleneck(in_modes, out_modes, **options)

    def reset_parameters(self) -> None:
        std = self.rank**-0.5 if self.init_std is None else self.init_std
        with torch.no_grad():
            for factor in self.factors:
                factor.normal_(0, std)

    def maps(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        stream_RN, feature_RD, *outs_RO = (factor.to(dtype=dtype).T for factor in self.factors)
        return _outer(stream_RN, feature_RD), _outer(*outs_RO)

    def stretched(self, maps: Sequence[Tensor | None]) -> dict[str, Tensor]:
        pairs = enumerate(zip(self.factors, maps, strict=True))
        return {f"factors.{k}": mode_product(factor.detach(), matrix, 0) for k, (factor, matrix) in pairs}

    def assign_dense(self, weight: Tensor) -> None:
        """Orthogonal rank-one terms by nested SVDs, largest kept; exact from rank prod(modes) / max(modes) on."""
        # The longest mode goes last: every other mode costs a factor in the number of terms.
        order = sorted(range(weight.ndim), key=lambda mode: weight.shape[mode])
        terms = sorted(_rank_one_terms(weight.permute(order)), key=lambda term: -term[0])[: self.rank]
        for mode, factor in enumerate(self.factors):
            # Equal norms in every mode keep the gradients of the factors comparable.
            columns = [vectors[order.index(mode)] * scale ** (1 / weight.ndim) for scale, vectors in terms]
            stacked = torch.stack(columns, -1) if columns else factor.new_zeros(factor.shape[0], 0)
            factor.copy_(fill_columns(stacked, self.rank))
        # Zero in one mode is enough for a filling term to add nothing.
        self.factors[-1][:, len(terms) :] = 0


def _outer(*factors: Tensor) -> Tensor:
    """Row by row outer product: (R, A), (R, B), .. -> (R, A, B, ..)."""
    product = factors[0]
    for factor in factors[1:]:
        product = product.unsqueeze(-1) * factor.view(-1, *(1,) * (product.ndim - 1), factor.shape[-1])
    return product


def _rank_one_terms(weight: Tensor) -> list[tuple[float, list[Tensor]]]:
    """W as a sum of mutually orthogonal unit rank-one tensors with their weights, zeros left out."""
    left, scales, right = torch.linalg.svd(weight.flatten(1), full_matrices=False)
    terms = []
    for column, scale, row in zip(left.T, scales.tolist(), right, strict=True):
        if scale == 0:
            continue
        inner = [(1.0, [row])] if weight.ndim == 2 else _rank_one_terms(row.view(weight.shape[1:]))
        terms += [(scale * inner_scale, [column, *vectors]) for inner_scale, vectors in inner]
    return terms
