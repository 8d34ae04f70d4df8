"""One tensor to N streams at the start of a network, and back at its end."""

from __future__ import annotations

from torch import Tensor


def expand_streams(x: Tensor, num_streams: int) -> Tensor:
    """N copies of x: (..., D) -> (..., N, D), contiguous."""
    if not isinstance(x, Tensor) or x.ndim < 1:
        raise ValueError(f"expand_streams wants a tensor (..., D), got {getattr(x, 'shape', type(x).__name__)}")
    if isinstance(num_streams, bool) or not isinstance(num_streams, int) or num_streams < 1:
        raise ValueError(f"num_streams is {num_streams!r}; expected a whole number >= 1")
    return x.unsqueeze(-2).expand(*x.shape[:-1], num_streams, x.shape[-1]).contiguous()


def reduce_streams(streams: Tensor) -> Tensor:
    """The sum over streams: (..., N, D) -> (..., D)."""
    if not isinstance(streams, Tensor) or streams.ndim < 2:
        raise ValueError(
            f"reduce_streams wants a tensor (..., N, D), got {getattr(streams, 'shape', type(streams).__name__)}"
        )
    # A sum of one would turn -0.0 into 0.0: one stream is the plain residual bit for bit.
    return streams.squeeze(-2) if streams.shape[-2] == 1 else streams.sum(-2)
