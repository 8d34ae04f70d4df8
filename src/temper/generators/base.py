"""The base class of generators: a stored tensor W, applied as a bottleneck of two maps.

Letters: N streams, D features, R bottleneck, O output modes (one or more).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from temper.ops.plan import GeneratorSpec
from temper.registry import Registered, check_int, is_int, lacking, without_memory

if TYPE_CHECKING:
    from temper.decompose.descent import Effort

Modes = tuple[int, ...]
Rank = int | float | tuple[int, ...] | None
Shapes = dict[str, tuple[int, ...]]


class Generator(Registered, nn.Module, family="generator"):
    """A tensor W of shape (N, D, *out_modes) that turns normed streams into logits.

        Z[o] = sum_{n,d} Hhat[n, d] W[n, d, o] = sum_r (sum_{n,d} Hhat[n, d] in_map[r, n, d]) out_map[r, o]

    A generator knows its modes and nothing about the mixer. A new one is a subclass in a
    file of its own: it says which tensors it stores (`shapes`), how they start
    (`reset_parameters`), what its two maps are (`maps`) and how to come closest to a dense W
    (`assign_dense`). See docs/adding-a-generator.md.
    """

    # Whether `rank` is an option; a generator without ranks leaves it False.
    ranked: ClassVar[bool] = False
    # Whether out_map is the identity, so that the bottleneck is the logits.
    direct: ClassVar[bool] = False

    def __init__(self, in_modes: Modes, out_modes: Modes, *, init_std: float | None = None) -> None:
        super().__init__()
        self.in_modes, self.out_modes = self.check_modes(in_modes, out_modes)
        if init_std is not None and not (isinstance(init_std, int | float) and 0 <= init_std < math.inf):
            raise ValueError(f"init_std is {init_std!r}; expected a finite number >= 0, or None for the default")
        self.init_std = init_std

    @classmethod
    def check_modes(cls, in_modes: Sequence[int], out_modes: Sequence[int]) -> tuple[Modes, Modes]:
        """Checks the modes and returns them as tuples; raises ValueError that names an invalid one."""
        in_modes, out_modes = tuple(in_modes), tuple(out_modes)
        if len(in_modes) != 2:
            raise ValueError(f"in_modes is {in_modes}; expected (num_streams, dim)")
        if not out_modes:
            raise ValueError("out_modes is empty; expected at least one output mode")
        for mode in in_modes + out_modes:
            check_int(f"modes {in_modes} -> {out_modes}: a mode", mode, 1)
        return in_modes, out_modes

    @classmethod
    def incompressible(cls) -> str | None:
        """Why a low-rank form of this generator makes no sense, or None if it does."""
        return None

    @classmethod
    def resolve_rank(cls, in_modes: Modes, out_modes: Modes, rank: Rank) -> Rank:
        """The rank in full: defaults filled in, fractions turned into numbers, limits checked."""
        return None

    @classmethod
    def shapes(cls, in_modes: Modes, out_modes: Modes, **options: Any) -> Shapes:
        """Name and shape of every trainable tensor, without allocating one."""
        raise lacking(cls, "shapes")

    @classmethod
    def frozen_shapes(cls, in_modes: Modes, out_modes: Modes, **options: Any) -> Shapes:
        """Name and shape of every tensor that is saved but not trained."""
        return {}

    @classmethod
    def fold_flops(cls, in_modes: Modes, out_modes: Modes, **options: Any) -> int:
        """FLOPs of making the two maps, once per forward whatever the number of tokens."""
        return 0

    @classmethod
    def bottleneck(cls, in_modes: Modes, out_modes: Modes, **options: Any) -> int:
        """R, the number of rows of the two maps."""
        raise lacking(cls, "bottleneck")

    def reset_parameters(self) -> None:
        """Sets every tensor to its initial value."""
        raise lacking(self, "reset_parameters")

    def maps(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """The bottleneck, differentiable in the parameters: in_map (R, N, D) and out_map (R, *out_modes).

        Args:
            dtype: the dtype to which stored tensors are cast before they are multiplied; their own if None.
        """
        raise lacking(self, "maps")

    def native(self) -> GeneratorSpec | None:
        """The spec of this generator for native kernels, or None. A generator with a spec implements `stored`."""
        return None

    def stored(self) -> tuple[Tensor, ...]:
        """The tensors in the order in which the native kernels take them."""
        raise lacking(self, "stored")

    def compression(self, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
        """Matrices whose Kronecker product takes Hhat, row after row, to the part of it that the generator sees."""
        return (self.maps(dtype)[0].flatten(1),)

    def assign_dense(self, weight: Tensor) -> None:
        """Overwrites the stored tensors with the best this generator finds for a dense W."""
        raise lacking(self, "assign_dense")

    def zero_output(self) -> None:
        """Sets W to zero by zeroing its last tensor alone, so that gradients still flow."""
        with torch.no_grad():
            *_, last = self.parameters()
            last.zero_()
        if not last.is_meta and self.to_dense().any():
            raise ValueError(
                f"the {self.name} generator is not zero where its last tensor is: it has to override `zero_output`"
            )

    def with_modes_mapped(self, maps: Sequence[Tensor | None]) -> dict[str, Tensor]:
        """The stored tensors, by name, of W with every mode k multiplied by the matrix maps[k], or left as it is.

        Args:
            maps: one (new mode, old mode) matrix or None for each of (N, D, *out_modes).
        """
        raise ValueError(f"the {self.name} generator does not grow to more streams: it has no `with_modes_mapped`")

    def assign_best(self, weight: Tensor, moment: Tensor | None, effort: Effort) -> None:
        """Improves on the stored tensors, which hold what `assign_dense` gave for this W, as far as it can.

        `temper.convert.factorize` calls it, in float64 on the CPU, and reverts to `assign_dense` if the error rose. A
        generator without a solver of its own leaves everything as it is. Import the solver inside the
        method, so that training alone does not pay for it.

        Args:
            moment: S (N * D, N * D); the error is tr((W - What)^T S (W - What)), or the sum of squares if None.
        """

    @classmethod
    def rank_path(cls, weight: Tensor) -> Sequence[tuple[Rank, float]]:
        """Ranks worth having, each larger than the one before, with estimates of the squared error.

        It starts at the smallest rank and ends where nothing is left to gain.
        """
        path: list[tuple[Rank, float]] = []
        modes = tuple(weight.shape)
        for rank in range(1, math.prod(modes) + 1) if cls.ranked else (None,):
            try:
                cls.resolve_rank(modes[:2], modes[2:], rank)
            except ValueError:
                break
            found = (weight - cls.from_dense(weight, rank).to_dense().detach()).square().sum().item()
            path.append((rank, found))
            if found <= 1e-24 * weight.square().sum().item():
                break
        return path

    def to_dense(self) -> Tensor:
        """W itself, (N, D, *out_modes)."""
        in_map, out_map = self.maps()
        return torch.tensordot(in_map.movedim(0, -1), out_map, dims=1)

    @classmethod
    def from_dense(cls, weight: Tensor, rank: Rank = None, **options: Any) -> Self:
        """A generator close to a dense W of shape (N, D, *out_modes): exact at full rank.

        Fast, but not the closest one: `temper.convert.factorize` searches for that.
        """
        if not isinstance(weight, Tensor) or weight.ndim < 3:
            raise ValueError(
                f"from_dense wants a tensor (num_streams, dim, *out_modes), got "
                f"{tuple(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__}"
            )
        if not weight.is_floating_point() or not torch.isfinite(weight).all():
            raise ValueError("from_dense wants a finite floating-point tensor")
        if cls.ranked:
            options["rank"] = rank
        elif rank is not None:
            raise ValueError(f"the {cls.name} generator has no rank, got rank={rank!r}")
        modes = tuple(weight.shape)
        # Skip random initialization: the values are overwritten at once.
        with without_memory():
            generator = cls(modes[:2], modes[2:], **options)
        generator = generator.to(weight.dtype).to_empty(device=weight.device)
        with torch.no_grad():
            generator.assign_dense(weight.detach())
        return generator

    def extra_repr(self) -> str:
        rank = f", rank={self.rank}" if self.ranked else ""
        return f"{self.in_modes} -> {self.out_modes}{rank}"


def check_rank(generator: str, what: str, rank: object, limit: int) -> int:
    """`rank` if it is a whole number in 1..limit, else a ValueError that names all three."""
    if not is_int(rank):
        raise ValueError(f"{generator} rank of {what} is {rank!r}; expected a whole number")
    if not 1 <= rank <= limit:
        raise ValueError(f"{generator} rank {rank} of {what} is out of range: expected 1 to {limit}")
    return rank


def fraction_of(generator: str, fraction: float, modes: Modes) -> int:
    """The number of parameters in a fraction of the dense tensor."""
    if not 0 < fraction <= 1:
        raise ValueError(f"{generator} rank {fraction!r} is a fraction of the dense parameters; expected 0 < rank <= 1")
    return int(fraction * math.prod(modes))


def ranks_within(budget: int, limits: Sequence[int], count: Callable[[tuple[int, ...]], int]) -> tuple[int, ...]:
    """The largest ranks in proportion to their limits whose parameters stay within the budget (at least 1 each)."""

    def ranks(scale: float) -> tuple[int, ...]:
        return tuple(max(1, int(scale * limit)) for limit in limits)

    low, high = 0.0, 1.0
    if count(ranks(high)) <= budget:
        return ranks(high)
    # The count only grows with the scale, and 50 halvings are finer than any rank step.
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if count(ranks(middle)) <= budget else (low, middle)
    return ranks(low)


def mode_product(tensor: Tensor, matrix: Tensor | None, mode: int) -> Tensor:
    """The tensor with one of its modes multiplied by a matrix (new, old); as it is if there is none."""
    if matrix is None:
        return tensor
    return torch.tensordot(matrix.to(tensor), tensor, dims=([1], [mode])).movedim(0, mode)


def fill_columns(columns: Tensor, total: int) -> Tensor:
    """A matrix with random columns added up to `total`.

    Where a rank is larger than a tensor needs, the padding is random on one side and zero on the other: W does
    not change, yet the zeros have a gradient and can learn, which zeros on both sides could not.
    """
    filling = columns.new_empty(columns.shape[0], total - columns.shape[1]).normal_(0, total**-0.5)
    return torch.cat([columns, filling], dim=1)


def count(shapes: Shapes) -> int:
    """The number of entries of all these shapes."""
    return sum(math.prod(shape) for shape in shapes.values())
