"""The data that sites and backends exchange: a site's spec, its weights, and its state between two calls.

Letters: T tokens, N streams, D features, R bottleneck rows, K = N^2 + 2N routing weights of a token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from temper.gates import Gates
from temper.streams import Routing

if TYPE_CHECKING:
    from temper.ops.backend import Backend
    from temper.ops.recompute import Origin


class FoldedWeights(NamedTuple):
    """The weights of a site with generators, gain and gates folded together.

    Shape:
        in_map: (R, N, D), the rows of pre, res and post below each other.
        out: flat; (rows, logits) of every head that is not direct.
        bias: flat; the logits of pre, res and post.
        scale: flat, as `bias`; the gates of a site that squashes logits before it scales them, None elsewhere.
    """

    in_map: Tensor
    out: Tensor
    bias: Tensor
    scale: Tensor | None = None


class RawWeights(NamedTuple):
    """The parameters of a site as they are stored: the gain, then generator, gate and bias of pre, res and post."""

    tensors: tuple[Tensor, ...]


# The generators that fold kernels support, in the order of their codes.
GENERATOR_KINDS = ("dense", "cp", "tucker", "tt")


class GeneratorSpec(NamedTuple):
    """The spec of a generator for fold kernels.

    Args:
        kind: one of GENERATOR_KINDS.
        ranks: as many as the kind has.
    """

    kind: str
    ranks: tuple[int, ...] = ()

    def packed(self, out_modes: tuple[int, ...]) -> list[int]:
        return [GENERATOR_KINDS.index(self.kind), len(out_modes), *out_modes, *self.ranks]


# The mixers that kernels support, in the order of their codes.
MIXER_KINDS = ("copy", "sinkhorn", "guarded", "newton", "permutations", "identity")


@dataclass(frozen=True)
class MixerSpec:
    """The spec of a mixer for kernels.

    Args:
        kind: one of MIXER_KINDS.
        factors: the sizes of a Kronecker product of permutation mixtures, the innermost first.
    """

    kind: str
    iters: int = 0
    last_columns: bool = False
    tol: float = 0.0
    eps: float = 0.0
    factors: tuple[int, ...] = ()


# The description of a site that only `naive` computes.
NOT_STANDARD = 'sites with tanh gates or a per-stream norm ("hc"), or with norm_outside (Megatron-Core)'


@dataclass(frozen=True)
class SiteSpec:
    """The sizes and constants of a site: everything a backend needs besides tensors and the mixer module.

    Args:
        rows: bottleneck rows of pre, res and post.
        direct: for each head, whether its bottleneck rows are its logits, without an output map.
        num_logits: of the mixer.
        norm_eps, norm_clamp, pre_eps: as in `RouterConfig`.
        mixer: the mixer for kernels; None if they do not support it.
        generators: the gain and the generators for fold kernels, packed; None if they do not support one of them.
        gates: the registered name of the gates.
        norm_per_stream: whether every stream is normed by itself.
        norm_outside: as in `RouterConfig`.

    Attributes:
        is_standard: sigmoid gates and one norm per token with its guard inside the root, as kernels compute them.
        head_logits: the number of logits of pre, res and post.
        map_sizes: entries of each head's output map in `FoldedWeights.out`.
        num_rows: R.
        num_weights: K.
        packed: integers and floats from which `from_packed` rebuilds the spec (without `generators`); operators
            carry them, so that graphs can be saved.
    """

    num_streams: int
    dim: int
    rows: tuple[int, int, int]
    direct: tuple[bool, bool, bool]
    num_logits: int
    norm_eps: float
    norm_clamp: bool
    pre_eps: float
    mixer: MixerSpec | None
    generators: tuple[int, ...] | None = None
    gates: str = "sigmoid"
    norm_per_stream: bool = False
    norm_outside: bool = False
    # Computed once, because every operation uses them.
    is_standard: bool = field(init=False, repr=False, compare=False)
    head_logits: tuple[int, int, int] = field(init=False, repr=False, compare=False)
    map_sizes: tuple[int, ...] = field(init=False, repr=False, compare=False)
    num_rows: int = field(init=False, repr=False, compare=False)
    num_weights: int = field(init=False, repr=False, compare=False)
    packed: tuple[list[int], list[float]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        head_logits = (self.num_streams, self.num_logits, self.num_streams)
        heads = zip(self.rows, head_logits, self.direct, strict=True)
        derived = {
            "is_standard": Gates.named(self.gates).fast and not (self.norm_per_stream or self.norm_outside),
            "head_logits": head_logits,
            "map_sizes": tuple(0 if direct else rows * logits for rows, logits, direct in heads),
            "num_rows": sum(self.rows),
            "num_weights": self.num_streams**2 + 2 * self.num_streams,
            "packed": self._pack_numbers(),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def _pack_numbers(self) -> tuple[list[int], list[float]]:
        mixer = self.mixer or MixerSpec(MIXER_KINDS[0])
        ints = [self.num_streams, self.dim, *self.rows, *self.direct, self.num_logits, self.norm_clamp]
        ints += [MIXER_KINDS.index(mixer.kind), mixer.iters, mixer.last_columns, *mixer.factors]
        return [int(number) for number in ints], [self.norm_eps, self.pre_eps, mixer.tol, mixer.eps]

    def split(self, weights: Tensor) -> Routing:
        """(..., K) -> pre (..., N), res (..., N, N), post (..., N)."""
        n = self.num_streams
        # Not `split`: where one part is unused, its backward would mix plain zeros with the parts of a DTensor.
        pre, res, post = weights[..., :n], weights[..., n : n + n * n], weights[..., n + n * n :]
        return Routing(pre, res.unflatten(-1, (n, n)), post)

    def pack(self, pre: Tensor, res: Tensor, post: Tensor) -> Tensor:
        """The inverse of `split`."""
        return torch.cat([pre, res.flatten(-2), post], dim=-1)

    @classmethod
    def from_packed(cls, ints: Sequence[int], floats: Sequence[float]) -> SiteSpec:
        """The spec that was packed; standard, as operators take no other."""
        return _from_packed(tuple(ints), tuple(floats))

    @classmethod
    def of_mixer(cls, num_streams: int, num_logits: int, mixer: MixerSpec | None) -> SiteSpec:
        """The spec of a mixer by itself."""
        return cls(num_streams, 1, (0, 0, 0), (True, True, True), num_logits, 0.0, False, 0.0, mixer)


@lru_cache(maxsize=1024)
def _from_packed(ints: tuple[int, ...], floats: tuple[float, ...]) -> SiteSpec:
    num_streams, dim, a, b, c, direct_a, direct_b, direct_c, logits, clamp, kind, iters, last, *factors = ints
    norm_eps, pre_eps, tol, eps = floats
    mixer = MixerSpec(MIXER_KINDS[kind], iters, bool(last), tol, eps, tuple(factors))
    direct = (bool(direct_a), bool(direct_b), bool(direct_c))
    return SiteSpec(num_streams, dim, (a, b, c), direct, logits, norm_eps, bool(clamp), pre_eps, mixer)


class Routed(NamedTuple):
    """The routing of T tokens, and the intermediate results that the backward of `begin` needs.

    Shape:
        weights: (T, K), float32 or float64: pre, res row by row, post.
        z: (T, R), the bottleneck before the norm.
        norms: (T, 2), rstd and the factor of H in the gradient of rstd.
    """

    weights: Tensor
    z: Tensor
    norms: Tensor


class State(NamedTuple):
    """The state that `begin` passes to `finish`.

    Args:
        streams: (..., N, D); `naive` holds them in the precision of the routing, all others in their own dtype.
        dtype: the dtype of the streams.
        weights: the routing weights, (T, K) or (..., K); None at a residual site.
        spec, backend: of the site; None at a residual one.
        link: carries the gradient of the next streams back to `begin`; None if autograd does not need it.
        origin: how to recompute the streams, if they are not saved for the backward pass.
    """

    streams: Tensor
    dtype: torch.dtype
    weights: Tensor | None = None
    spec: SiteSpec | None = None
    backend: Backend | None = None
    link: Tensor | None = None
    origin: Origin | None = None

    @property
    def routing(self) -> Routing | None:
        """The routing in full precision; None at a residual site."""
        if self.spec is None or self.weights is None:
            return None
        return self.spec.split(self.weights.view(*self.streams.shape[:-2], self.spec.num_weights))


def tokens_of(streams: Tensor) -> Tensor:
    """(..., N, D) -> (T, N, D)."""
    # Not -1, which is ambiguous without tokens.
    return streams.view(math.prod(streams.shape[:-2]), *streams.shape[-2:])
