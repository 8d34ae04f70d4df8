"""Tensor train: a chain of cores, one per mode (paper, the TT variant)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from temper.generators.base import (
    Generator,
    Modes,
    Rank,
    Shapes,
    check_rank,
    count,
    fill_columns,
    fraction_of,
    mode_product,
    ranks_within,
)
from temper.ops.plan import GeneratorSpec

if TYPE_CHECKING:
    from temper.decompose.descent import Effort


class TT(Generator, name="tt"):
    """W[i_1, .., i_m] = G_1[:, i_1, :] G_2[:, i_2, :] .. G_m[:, i_m, :]; cores (r_{k-1}, mode, r_k), ends 1.

    Args:
        rank: one number per bond between neighbouring modes; two numbers (r_1, r_2) repeat the
            last for further bonds; one number is the same for every bond; a fraction counts
            dense parameters.
    """

    ranked = True

    def __init__(self, in_modes: Modes, out_modes: Modes, *, rank: Rank = None, init_std: float | None = None) -> None:
        super().__init__(in_modes, out_modes, init_std=init_std)
        self.rank = self.resolve_rank(self.in_modes, self.out_modes, rank)
        shapes = self.shapes(self.in_modes, self.out_modes, rank=self.rank)
        self.cores = nn.ParameterList(torch.empty(shape) for shape in shapes.values())
        self.reset_parameters()

    @classmethod
    def resolve_rank(cls, in_modes: Modes, out_modes: Modes, rank: Rank) -> tuple[int, ...]:
        """One whole number per bond."""
        modes = in_modes + out_modes
        limits = tuple(min(math.prod(modes[:k]), math.prod(modes[k:])) for k in range(1, len(modes)))
        if rank is None:
            # As many feature parameters as Tucker's default: r_1 r_2 = r_d.
            num_streams = in_modes[0]
            wanted = (3 if num_streams == 4 else 4, num_streams)
            return tuple(min(r, limit) for r, limit in zip(_spread(wanted, limits), limits, strict=True))
        if isinstance(rank, float):
            budget = fraction_of(cls.name, rank, modes)
            return ranks_within(budget, limits, lambda r: count(_shapes(modes, r)))
        if isinstance(rank, tuple) and len(rank) not in (2, len(limits)):
            raise ValueError(f"tt rank {rank} for modes {modes}: expected {len(limits)} bond ranks, two, or one")
        return tuple(
            check_rank(cls.name, f"the bond between modes {k} and {k + 1} of {modes}", r, limit)
            for k, (r, limit) in enumerate(zip(_spread(rank, limits), limits, strict=True))
        )

    @classmethod
    def shapes(cls, in_modes: Modes, out_modes: Modes, **options: Any) -> Shapes:
        return _shapes(in_modes + out_modes, cls.resolve_rank(in_modes, out_modes, options.get("rank")))

    @classmethod
    def bottleneck(cls, in_modes: Modes, out_modes: Modes, **options: Any) -> int:
        return cls.resolve_rank(in_modes, out_modes, options.get("rank"))[1]

    @classmethod
    def fold_flops(cls, in_modes: Modes, out_modes: Modes, **options: Any) -> int:
        ranks = cls.resolve_rank(in_modes, out_modes, options.get("rank"))
        flops = 2 * math.prod(in_modes) * ranks[0] * ranks[1]
        for k in range(1, len(out_modes)):
            right = ranks[k + 2] if k + 2 < len(ranks) else 1
            flops += 2 * ranks[1] * math.prod(out_modes[: k + 1]) * ranks[k + 1] * right
        return flops

    def reset_parameters(self) -> None:
        std = max(self.rank) ** -0.5 if self.init_std is None else self.init_std
        with torch.no_grad():
            for core in self.cores:
                core.normal_(0, std)

    def maps(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        stream_1NA, feature_ADR, out_map, *rest = (core.to(dtype=dtype) for core in self.cores)
        in_map_RND = torch.tensordot(stream_1NA[0], feature_ADR, dims=1).movedim(-1, 0)
        for core in rest:
            out_map = torch.tensordot(out_map, core, dims=1)
        return in_map_RND, out_map.squeeze(-1)

    def native(self) -> GeneratorSpec:
        return GeneratorSpec("tt", self.rank)

    def stored(self) -> tuple[Tensor, ...]:
        return tuple(self.cores)

    def with_modes_mapped(self, maps: Sequence[Tensor | None]) -> dict[str, Tensor]:
        pairs = enumerate(zip(self.cores, maps, strict=True))
        return {f"cores.{k}": mode_product(core.detach(), matrix, 1) for k, (core, matrix) in pairs}

    def assign_dense(self, weight: Tensor) -> None:
        """TT-SVD: one truncated SVD per bond, from left to right."""
        carry, left_rank = weight, 1
        for core, mode, r in zip(self.cores, weight.shape, self.rank, strict=False):
            unfolding = carry.reshape(left_rank * mode, -1)
            left = torch.linalg.svd(unfolding, full_matrices=False).U[:, :r]
            core.copy_(fill_columns(left, r).view(core.shape))
            # Padding columns contribute zero to the next core.
            carry = F.pad(left.T @ unfolding, (0, 0, 0, r - left.shape[1]))
            left_rank = r
        self.cores[-1].copy_(carry.view(self.cores[-1].shape))

    def assign_best(self, weight: Tensor, moment: Tensor | None, effort: Effort) -> None:
        """TT-SVD, then sweeps over pairs of cores; or their counterpart under a moment."""
        from temper.decompose.moment import Moment
        from temper.decompose.tt import tt, weighted_tt

        if moment is None:
            cores = tt(weight, self.rank, effort)
        else:
            measure = Moment(moment.view(*self.in_modes, *self.in_modes))
            cores = weighted_tt(weight, self.rank, measure, effort)
        for stored, core in zip(self.cores, cores, strict=True):
            rows, mode, columns = core.shape
            # New columns are random, and the matching rows of the next core are zero.
            filled = fill_columns(core.reshape(-1, columns), stored.shape[2]).view(rows, mode, -1)
            stored.copy_(F.pad(filled, (0, 0, 0, 0, 0, stored.shape[0] - rows)))

    @classmethod
    def rank_path(cls, weight: Tensor) -> Sequence[tuple[Rank, float]]:
        """By the singular values that TT-SVD leaves out at every bond."""
        from temper.decompose import path
        from temper.decompose.tt import useful_bonds

        modes = tuple(weight.shape)
        unfoldings = [weight.reshape(math.prod(modes[:k]), -1) for k in range(1, len(modes))]
        tails = [path.tails(unfolding) for unfolding in unfoldings]
        limits = [path.numerical_rank(unfolding) for unfolding in unfoldings]
        return path.greedy(
            useful_bonds(modes, limits),
            lambda rank: count(_shapes(modes, rank)),
            lambda rank: sum(tail[r] for tail, r in zip(tails, rank, strict=True)),
            lambda rank: useful_bonds(modes, rank) == rank,
        )


def _spread(rank: Any, limits: tuple[int, ...]) -> tuple[Any, ...]:
    """One rank per bond from the short forms r and (r_1, r_2)."""
    if not isinstance(rank, tuple):
        return (rank,) * len(limits)
    return (*rank, *(rank[-1],) * (len(limits) - len(rank)))


def _shapes(modes: Modes, rank: tuple[int, ...]) -> Shapes:
    bonds = (1, *rank, 1)
    return {f"cores.{k}": (bonds[k], mode, bonds[k + 1]) for k, mode in enumerate(modes)}
