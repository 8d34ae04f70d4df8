"""The base class of mixers: logits in, an N x N mixing matrix out."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from temper.ops import backend
from temper.ops.plan import MixerSpec, SiteSpec
from temper.registry import Registered, check_int, lacking

# How far the sums along one axis of res are one: for all logits ("exact"), as the mixer's own approximation converges
# ("limit"), or with no promise ("no"). The first two also promise that no entry is negative.
Stochastic = Literal["exact", "limit", "no"]


class Growth(NamedTuple):
    """The logits of k N streams from those of N, where stream m is a copy of stream m mod N.

    Args:
        maps: for every mode of the logits the matrix (new, old) that the dynamic part is multiplied by.
        bias: the new one.
        gate: what the gate is multiplied by.
    """

    maps: tuple[Tensor, ...]
    bias: Tensor
    gate: float = 1.0


class Mixer(Registered, nn.Module, family="mixer"):
    """Turns logits of shape (..., *logit_shape) into `res` of shape (..., N, N).

    Orientation: row m of `res` says where output stream m comes from (`temper.streams`).
    A new mixer is a subclass in a file of its own: which logits it needs (`logit_shape_for`), where
    they start (`initial_bias`) and what they become (`mix`). That is enough to work; `vjp` makes it fast on every
    device and `native` on a CPU. See docs/adding-a-mixer.md.
    """

    # Whether the rows of res sum to one, and whether its columns do. A mixer may set them from its options.
    row_stochastic: Stochastic = "no"
    column_stochastic: Stochastic = "no"

    def __init__(self, num_streams: int) -> None:
        super().__init__()
        check_int("num_streams", num_streams, 1)
        reason = self.refusal(num_streams)
        if reason:
            raise ValueError(reason)
        self.num_streams = num_streams
        self.logit_shape = self.logit_shape_for(num_streams)

    @classmethod
    def logit_shape_for(cls, num_streams: int) -> tuple[int, ...]:
        """The output modes that a generator must have, without building anything."""
        raise lacking(cls, "logit_shape_for")

    @classmethod
    def refusal(cls, num_streams: int) -> str | None:
        """The reason why this mixer cannot be built for this number of streams, or None if it can."""
        return None

    @classmethod
    def flops(cls, num_streams: int, **options: Any) -> int:
        """FLOPs per token from logits to res, a multiply and add counted as two, an exp as one."""
        return 0

    @classmethod
    def saved(cls, num_streams: int, **options: Any) -> int:
        """Numbers per token that autograd saves between logits and res."""
        return 0

    def initial_bias(self) -> Tensor:
        """The bias, of shape logit_shape, at which res is (nearly) the identity."""
        raise lacking(self, "initial_bias")

    def grow(self, bias: Tensor, copies: int) -> Growth:
        """Logits for `copies` times as many streams, whose res is equivalent to this one on copies of the streams.

        Copies of one stream should hardly mix with each other: res (x) V with V near the identity.
        """
        raise ValueError(f"the {self.name} mixer does not grow: no logits of it do to copied streams what these did")

    def mix(self, logits: Tensor) -> Tensor:
        """res (..., N, N) by definition: the reference for every faster path."""
        raise lacking(self, "mix")

    def forward_fast(self, logits: Tensor) -> Tensor:
        """The same without autograd, possibly faster."""
        return self.mix(logits)

    def vjp(self, logits: Tensor, res: Tensor, grad: Tensor) -> Tensor:
        """The vector-Jacobian product: the gradient of the logits from that of res, without autograd."""
        raise lacking(self, "vjp")

    @property
    def has_vjp(self) -> bool:
        """Whether there is a `vjp` for these options."""
        return type(self).vjp is not Mixer.vjp

    @property
    def is_bounded(self) -> bool:
        """Whether every entry of res is between zero and one, as rows or columns that sum to one make it."""
        return self.row_stochastic != "no" or self.column_stochastic != "no"

    def lipschitz(self) -> float:
        """A proved L with ||res(a) - res(b)||_F <= L ||a - b||_F + slack for all logits a and b."""
        raise ValueError(
            f"no Lipschitz constant is known of the {self.name} mixer; give it a `lipschitz` (docs/adding-a-mixer.md)"
        )

    def slack(self, logits: Tensor, res: Tensor, other_logits: Tensor, other_res: Tensor) -> Tensor:
        """The slack of `lipschitz` for two logits and their matrices: (...). Zero where the bound holds without it."""
        return res.new_zeros(res.shape[:-2])

    def native(self) -> MixerSpec | None:
        """The spec of this mixer for native kernels, or None."""
        return None

    def site_spec(self) -> SiteSpec:
        """The spec with which a backend runs this mixer alone."""
        return SiteSpec.of_mixer(self.num_streams, math.prod(self.logit_shape), self.native())

    def forward(self, logits: Tensor) -> Tensor:
        """res (..., N, N) of logits (..., *logit_shape), by the fastest backend that serves."""
        return backend.choose(logits, self.site_spec(), self).mix(logits, self)


def copy_map(num_streams: int, copies: int) -> Tensor:
    """The selection matrix from streams to copies: (copies * N, N), a one in every row."""
    return torch.eye(num_streams, dtype=torch.float64).repeat(copies, 1)
