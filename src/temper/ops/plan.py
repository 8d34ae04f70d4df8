"""What an implementation is told about a site besides its tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from temper.routing import Routing


class Fold(NamedTuple):
    """The weights of a site as its operations want them: generators, gain and gates folded together.

    Shape:
        in_map: (R, N, D), the rows of pre, res and post below each other.
        out: flat; for each head that is not direct, (rows, logits).
        bias: flat; the logits of pre, res and post.
    """

    in_map: Tensor
    out: Tensor
    bias: Tensor


# The generators of the native kernels, in the order of their codes.
FORMS = ("dense", "cp", "tucker", "tt")


class Form(NamedTuple):
    """A generator as the native kernels know it.

    Args:
        kind: one of FORMS.
        ranks: as many as the kind has.
    """

    kind: str
    ranks: tuple[int, ...] = ()

    def numbers(self, out_modes: tuple[int, ...]) -> list[int]:
        return [FORMS.index(self.kind), len(out_modes), *out_modes, *self.ranks]


# The mixers of the native kernels, in the order of their codes.
KINDS = ("copy", "sinkhorn", "guarded", "newton", "permutations", "identity")


@dataclass(frozen=True)
class Native:
    """A mixer as the native kernels know it.

    Args:
        kind: one of KINDS.
        factors: the sizes of a Kronecker product of permutation mixtures, the innermost first.
    """

    kind: str
    iters: int = 0
    last_columns: bool = False
    tol: float = 0.0
    eps: float = 0.0
    factors: tuple[int, ...] = ()


@dataclass(frozen=True)
class Plan:
    """The sizes and constants of a site.

    Args:
        rows: the bottleneck of pre, res and post.
        direct: for each head, whether its bottleneck is its logits, without an output map.
        logits: how many the mixer takes.
        norm_eps, norm_clamp, pre_eps: as in `RouterConfig`.
        native: the mixer for the native kernels; None where they do not know it.
        form: the gain and the generators for the native kernels; None where they do not know one of them.
    """

    num_streams: int
    dim: int
    rows: tuple[int, int, int]
    direct: tuple[bool, bool, bool]
    logits: int
    norm_eps: float
    norm_clamp: bool
    pre_eps: float
    native: Native | None
    form: tuple[int, ...] | None = None
    # The plan as operators on streams carry it; `from_numbers` reads it back, without the form.
    numbers: tuple[list[int], list[float]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Once: every call of every operator asks for them.
        object.__setattr__(self, "numbers", self._count_up())

    def _count_up(self) -> tuple[list[int], list[float]]:
        native = self.native or Native(KINDS[0])
        whole = [self.num_streams, self.dim, *self.rows, *self.direct, self.logits, self.norm_clamp]
        whole += [KINDS.index(native.kind), native.iters, native.last_columns, *native.factors]
        return [int(number) for number in whole], [self.norm_eps, self.pre_eps, native.tol, native.eps]

    @property
    def logits_of(self) -> tuple[int, int, int]:
        """The number of logits of each head."""
        return self.num_streams, self.logits, self.num_streams

    @property
    def num_weights(self) -> int:
        """Routing weights of a token: pre, res and post."""
        return self.num_streams**2 + 2 * self.num_streams

    @property
    def map_sizes(self) -> list[int]:
        """Entries of each head's output map in `Fold.out`."""
        return [
            0 if direct else rows * logits
            for rows, logits, direct in zip(self.rows, self.logits_of, self.direct, strict=True)
        ]

    def split(self, weights: Tensor) -> Routing:
        """(..., K) -> pre (..., N), res (..., N, N), post (..., N)."""
        n = self.num_streams
        pre, res, post = weights.split([n, n * n, n], dim=-1)
        return Routing(pre, res.unflatten(-1, (n, n)), post)

    def pack(self, pre: Tensor, res: Tensor, post: Tensor) -> Tensor:
        """The inverse of `split`."""
        return torch.cat([pre, res.flatten(-2), post], dim=-1)

    @classmethod
    def from_numbers(cls, whole: tuple[int, ...], real: tuple[float, ...]) -> Plan:
        num_streams, dim, a, b, c, direct_a, direct_b, direct_c, logits, clamp, kind, iters, last, *factors = whole
        norm_eps, pre_eps, tol, eps = real
        native = Native(KINDS[kind], iters, bool(last), tol, eps, tuple(factors))
        direct = (bool(direct_a), bool(direct_b), bool(direct_c))
        return cls(num_streams, dim, (a, b, c), direct, logits, norm_eps, bool(clamp), pre_eps, native)

    @classmethod
    def of_mixer(cls, num_streams: int, logits: int, native: Native | None) -> Plan:
        """For a mixer by itself."""
        return cls(num_streams, 1, (0, 0, 0), (True, True, True), logits, 0.0, False, 0.0, native)
