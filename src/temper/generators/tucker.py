"""Tucker: a small core and one factor per mode (paper, TEMPER-Tucker)."""

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


class Tucker(Generator, name="tucker"):
    """W = core x_1 U x_2 C x_3 V .. ; core (r_n, r_d, r_o..), factors (mode, r).

    Args:
        rank: one number per mode; two numbers (r_n, r_d) stand for r_n on every stream mode and
            r_d on the feature mode; one number is the same for every mode; a fraction counts
            dense parameters.
        freeze_core: the core keeps its initial value, is saved, and is not trained.
    """

    ranked = True

    def __init__(
        self,
        in_modes: Modes,
        out_modes: Modes,
        *,
        rank: Rank = None,
        init_std: float | None = None,
        freeze_core: bool = False,
    ) -> None:
        super().__init__(in_modes, out_modes, init_std=init_std)
        self.rank = self.resolve_rank(self.in_modes, self.out_modes, rank)
        if not isinstance(freeze_core, bool):
            raise ValueError(f"freeze_core is {freeze_core!r}; expected True or False")
        self.freeze_core = freeze_core
        modes = self.in_modes + self.out_modes
        core = torch.empty(self.rank)
        if freeze_core:
            self.register_buffer("core", core)
        else:
            self.core = nn.Parameter(core)
        self.factors = nn.ParameterList(torch.empty(mode, r) for mode, r in zip(modes, self.rank, strict=True))
        self.reset_parameters()

    @classmethod
    def resolve_rank(cls, in_modes: Modes, out_modes: Modes, rank: Rank) -> tuple[int, ...]:
        """One whole number per mode."""
        modes = in_modes + out_modes
        num_streams = in_modes[0]
        if rank is None:
            # The paper's feature rank: 12 at four streams, 32 at eight.
            wanted = (2, 12 if num_streams == 4 else 4 * num_streams)
            return tuple(min(r, mode) for r, mode in zip(_spread(wanted, modes), modes, strict=True))
        if isinstance(rank, float):
            budget = fraction_of(cls.name, rank, modes)
            return ranks_within(budget, modes, lambda r: count(_all_shapes(modes, r)))
        if isinstance(rank, tuple) and len(rank) not in (2, len(modes)):
            raise ValueError(
                f"tucker rank {rank} for modes {modes}: expected {len(modes)} numbers, (stream, feature), or one"
            )
        names = ["stream", "feature", *(f"output {k}" for k in range(len(out_modes)))]
        return tuple(
            check_rank(cls.name, f"the {name} mode (size {mode})", r, mode)
            for name, mode, r in zip(names, modes, _spread(rank, modes), strict=True)
        )

    @classmethod
    def shapes(cls, in_modes: Modes, out_modes: Modes, **options: Any) -> Shapes:
        shapes = cls._split(in_modes, out_modes, options)
        return shapes if not options.get("freeze_core") else {k: v for k, v in shapes.items() if k != "core"}

    @classmethod
    def frozen_shapes(cls, in_modes: Modes, out_modes: Modes, **options: Any) -> Shapes:
        shapes = cls._split(in_modes, out_modes, options)
        return {"core": shapes["core"]} if options.get("freeze_core") else {}

    @classmethod
    def _split(cls, in_modes: Modes, out_modes: Modes, options: dict[str, Any]) -> Shapes:
        return _all_shapes(in_modes + out_modes, cls.resolve_rank(in_modes, out_modes, options.get("rank")))

    @classmethod
    def bottleneck(cls, in_modes: Modes, out_modes: Modes, **options: Any) -> int:
        return math.prod(cls.resolve_rank(in_modes, out_modes, options.get("rank"))[2:])

    @classmethod
    def fold_flops(cls, in_modes: Modes, out_modes: Modes, **options: Any) -> int:
        r_n, r_d, *r_out = cls.resolve_rank(in_modes, out_modes, options.get("rank"))
        num_streams, dim = in_modes
        rows = math.prod(r_out)
        # The core meets the stream factor, then the feature factor; the output factors meet each other.
        kron = sum(math.prod(out_modes[:k]) * math.prod(r_out[:k]) for k in range(2, len(out_modes) + 1))
        return 2 * rows * r_d * num_streams * (r_n + dim) + kron

    def reset_parameters(self) -> None:
        std = max(self.rank) ** -0.5 if self.init_std is None else self.init_std
        with torch.no_grad():
            for tensor in (self.core, *self.factors):
                tensor.normal_(0, std)

    def maps(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        stream_NA, feature_DB, *outs = (factor.to(dtype=dtype) for factor in self.factors)
        core_RAB = self.core.to(dtype=dtype).flatten(2).movedim(-1, 0)
        in_map_RND = stream_NA @ core_RAB @ feature_DB.T
        out_map = outs[0].T
        for factor_OQ in outs[1:]:
            # Kronecker in the ranks, outer in the modes: (P, O..) and (Q, O) make (P * Q, O.., O).
            wide = factor_OQ.T.view(1, -1, *(1,) * (out_map.ndim - 1), factor_OQ.shape[0])
            out_map = (out_map[:, None, ..., None] * wide).flatten(0, 1)
        return in_map_RND, out_map

    def native(self) -> GeneratorSpec:
        return GeneratorSpec("tucker", self.rank)

    def stored(self) -> tuple[Tensor, ...]:
        return self.core, *self.factors

    def compression(self, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
        """L(Hhat) = U^T Hhat C: the core acts on this alone."""
        stream_NA, feature_DB = (factor.to(dtype=dtype) for factor in self.factors[:2])
        return stream_NA.T, feature_DB.T

    def with_modes_mapped(self, maps: Sequence[Tensor | None]) -> dict[str, Tensor]:
        factors = zip(self.factors, maps, strict=True)
        stretched = {
            f"factors.{k}": mode_product(factor.detach(), matrix, 0) for k, (factor, matrix) in enumerate(factors)
        }
        return {"core": self.core.detach(), **stretched}

    def assign_dense(self, weight: Tensor) -> None:
        """HOSVD: the leading left singular vectors of every unfolding."""
        core = weight
        for mode, (factor, r) in enumerate(zip(self.factors, self.rank, strict=True)):
            left = torch.linalg.svd(weight.movedim(mode, 0).flatten(1), full_matrices=False).U[:, :r]
            factor.copy_(fill_columns(left, r))
            core = torch.tensordot(core, left, dims=([mode], [0]))
            # Core entries of the padding are zero.
            core = F.pad(core, (0, r - left.shape[1])).movedim(-1, mode)
        self.core.copy_(core)

    def assign_best(self, weight: Tensor, moment: Tensor | None, effort: Effort) -> None:
        """HOOI, or its counterpart under a moment."""
        from temper.decompose.moment import Moment
        from temper.decompose.tucker import tucker, weighted_tucker

        if moment is None:
            core, *factors = tucker(weight, self.rank, effort)
        else:
            measure = Moment(moment.view(*self.in_modes, *self.in_modes))
            core, *factors = weighted_tucker(weight, self.rank, measure, effort)
        padding = [(0, r - used) for r, used in zip(self.rank, core.shape, strict=True)]
        # Core entries of the padding are zero; pad counts modes from the last.
        self.core.copy_(F.pad(core, [n for pair in reversed(padding) for n in pair]))
        for stored, factor in zip(self.factors, factors, strict=True):
            stored.copy_(fill_columns(factor, stored.shape[1]))

    @classmethod
    def rank_path(cls, weight: Tensor) -> Sequence[tuple[Rank, float]]:
        """Estimates from the energy of the HOSVD core inside the ranks; skips ranks that the other modes cannot use."""
        from temper.decompose import path
        from temper.decompose.tucker import leading, useful_ranks

        modes, core = tuple(weight.shape), weight
        limits = [path.numerical_rank(weight.movedim(mode, 0).flatten(1)) for mode in range(weight.ndim)]
        for mode, limit in enumerate(limits):
            core = torch.tensordot(core, leading(weight, mode, limit), dims=([mode], [0])).movedim(-1, mode)
        inside = core.square()
        for mode in range(weight.ndim):
            inside = inside.cumsum(mode)
        inside = inside.contiguous()
        energy = inside.flatten().tolist()
        strides = inside.stride()

        def error(rank: tuple[int, ...]) -> float:
            at = sum(stride * (r - 1) for stride, r in zip(strides, rank, strict=True))
            return max(0.0, energy[-1] - energy[at])

        return path.greedy(
            useful_ranks(modes, limits),
            lambda rank: count(_all_shapes(modes, rank)),
            error,
            lambda rank: useful_ranks(modes, rank) == rank,
        )


def _spread(rank: Any, modes: Modes) -> tuple[Any, ...]:
    """One rank per mode from the short forms r and (r_n, r_d)."""
    if not isinstance(rank, tuple):
        return (rank,) * len(modes)
    if len(rank) == 2:
        return (rank[0], rank[1], *(rank[0],) * (len(modes) - 2))
    return rank


def _all_shapes(modes: Modes, rank: tuple[int, ...]) -> Shapes:
    factors = {f"factors.{k}": (mode, r) for k, (mode, r) in enumerate(zip(modes, rank, strict=True))}
    return {"core": rank, **factors}
