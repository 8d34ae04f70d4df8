"""The RMS norm in front of the generators, with the gain in one of four forms."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from temper.generators.base import Shapes
from temper.ops.naive import reciprocal_rms
from temper.registry import unknown

GAINS = ("full", "rank-one", "feature", "none")
NORMS = ("flat", "per-stream")


class StreamNorm(nn.Module):
    """Hhat = H * rsqrt(mean(H^2) + eps) * g.

    Args:
        gain: g is "full" (N x D, the paper's), "rank-one" (an N-vector times a D-vector), "feature"
            (a D-vector, HC's) or "none".
        norm: the mean runs over all N * D entries ("flat") or over each stream ("per-stream", HC's).
        eps: added to the mean square.
        clamp: use eps as a lower limit of the mean square instead of adding it.
        outside: add eps to the root of the mean square instead.
    """

    def __init__(
        self,
        num_streams: int,
        dim: int,
        *,
        gain: str = "full",
        norm: str = "flat",
        eps: float = 1e-6,
        clamp: bool = False,
        outside: bool = False,
    ) -> None:
        super().__init__()
        self.per_stream = norm == "per-stream"
        self.eps, self.clamp, self.outside = eps, clamp, outside
        shapes = gain_shapes(gain, num_streams, dim)
        self._names = tuple(shapes)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(1.0)

    def stored(self) -> tuple[Tensor, ...]:
        """The gain's parameters."""
        # Looked up by name, because FSDP1 and `functional_call` replace parameters by tensors.
        return tuple(getattr(self, name) for name in self._names)

    def gain(self) -> Tensor | None:
        """g, broadcastable to (N, D), or None."""
        if not self._names:
            return None
        first, *rest = self.stored()
        return torch.outer(first, *rest) if rest else first

    def rstd(self, streams: Tensor) -> Tensor:
        """The reciprocal root mean square: (..., 1, 1), or (..., N, 1) per stream."""
        return reciprocal_rms(streams, self.per_stream, self.eps, self.clamp, self.outside)


def gain_shapes(gain: str, num_streams: int, dim: int) -> Shapes:
    """Name and shape of the gain's parameters."""
    forms: dict[str, Shapes] = {
        "full": {"weight": (num_streams, dim)},
        "rank-one": {"stream": (num_streams,), "feature": (dim,)},
        "feature": {"weight": (dim,)},
        "none": {},
    }
    if gain not in forms:
        raise unknown("gain", gain, GAINS)
    return forms[gain]
