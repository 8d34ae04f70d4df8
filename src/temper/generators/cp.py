"""CP: W as a sum of R rank-one tensors (paper, TEMPER-CP)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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
from temper.ops.plan import GeneratorSpec

if TYPE_CHECKING:
    from temper.decompose.descent import Effort


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

    def native(self) -> GeneratorSpec:
        return GeneratorSpec("cp", (self.rank,))

    def stored(self) -> tuple[Tensor, ...]:
        return tuple(self.factors)

    def with_modes_mapped(self, maps: Sequence[Tensor | None]) -> dict[str, Tensor]:
        pairs = enumerate(zip(self.factors, maps, strict=True))
        return {f"factors.{k}": mode_product(factor.detach(), matrix, 0) for k, (factor, matrix) in pairs}

    def assign_dense(self, weight: Tensor) -> None:
        """The largest orthogonal rank-one terms of nested SVDs; exact from rank prod(modes) / max(modes) on."""
        permuted, order = _short_first(weight)
        terms = sorted(_rank_one_terms(permuted), key=lambda term: -term[0])[: self.rank]
        for mode, factor in enumerate(self.factors):
            # Equal norms in every mode keep the gradients of the factors comparable.
            columns = [vectors[order.index(mode)] * scale ** (1 / weight.ndim) for scale, vectors in terms]
            stacked = torch.stack(columns, -1) if columns else factor.new_zeros(factor.shape[0], 0)
            factor.copy_(fill_columns(stacked, self.rank))
        # One zero mode is enough for a padding term to contribute nothing.
        self.factors[-1][:, len(terms) :] = 0

    def assign_best(self, weight: Tensor, moment: Tensor | None, effort: Effort) -> None:
        """Alternating least squares from the nested SVDs, from singular vectors and from random factors."""
        from temper.decompose.cp import cp, weighted_cp
        from temper.decompose.moment import Moment

        first = tuple(factor.clone() for factor in self.factors)
        if moment is None:
            found = cp(weight, self.rank, effort, first=first)
        else:
            measure = Moment(moment.view(*self.in_modes, *self.in_modes))
            found = weighted_cp(weight, self.rank, measure, effort, first=first)
        for stored, factor in zip(self.factors, found, strict=True):
            stored.copy_(factor)

    @classmethod
    def rank_path(cls, weight: Tensor) -> Sequence[tuple[Rank, float]]:
        """An estimate between the error of nested SVDs, an upper bound, and of the longest unfolding, a lower bound."""
        from temper.decompose import path

        found = sorted((scale for scale, _ in _rank_one_terms(_short_first(weight)[0])), reverse=True)
        scales = torch.tensor(found, dtype=torch.float64)
        if not scales.numel():
            return [(1, 0.0)]
        terms = int((scales > 1e-12 * scales[0]).sum())
        above = path.tails_of(scales)
        below = [path.tails(weight.movedim(mode, 0).flatten(1)) for mode in range(weight.ndim)]
        # More terms may help as long as nested SVDs leave an error.
        lower = [max(tail[min(r, len(tail) - 1)] for tail in below) for r in range(1, terms + 1)]
        errors = [math.sqrt(upper * max(low, 1e-4 * upper)) for low, upper in zip(lower, above[1:], strict=False)]
        return list(zip(range(1, terms + 1), errors, strict=True))


def _short_first(weight: Tensor) -> tuple[Tensor, list[int]]:
    """Modes from the shortest to the longest: every mode but the last costs a factor in the number of terms."""
    order = sorted(range(weight.ndim), key=lambda mode: weight.shape[mode])
    return weight.permute(order), order


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
