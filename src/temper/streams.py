"""Streams at both ends of a network, their precision inside a site, and the routing of a token."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from temper.registry import check_int


def expand_streams(x: Tensor, num_streams: int) -> Tensor:
    """N copies of x: (..., D) -> (..., N, D), contiguous."""
    if not isinstance(x, Tensor) or x.ndim < 1:
        raise ValueError(f"expand_streams wants a tensor (..., D), got {getattr(x, 'shape', type(x).__name__)}")
    check_int("num_streams", num_streams, 1)
    return x.unsqueeze(-2).expand(*x.shape[:-1], num_streams, x.shape[-1]).contiguous()


def reduce_streams(streams: Tensor) -> Tensor:
    """The sum over streams: (..., N, D) -> (..., D)."""
    if not isinstance(streams, Tensor) or streams.ndim < 2:
        raise ValueError(
            f"reduce_streams wants a tensor (..., N, D), got {getattr(streams, 'shape', type(streams).__name__)}"
        )
    # A sum of one would turn -0.0 into 0.0: one stream is the plain residual bit for bit.
    return streams.squeeze(-2) if streams.shape[-2] == 1 else streams.sum(-2)


_NOTHING = nullcontext()


def widen(streams: Tensor) -> Tensor:
    """The streams in the precision of routing and mixing: float32, or float64 if they are."""
    return streams.to(torch.promote_types(streams.dtype, torch.float32))


def no_autocast(streams: Tensor) -> AbstractContextManager[Any]:
    """Autocast off on the device of the streams: routing and mixing are not for half precision."""
    device = streams.device.type
    # Skip the availability check on CPU, where call overhead matters.
    available = device == "cpu" or torch.amp.is_autocast_available(device)
    if not available or not torch.is_autocast_enabled(device):
        return _NOTHING
    return torch.autocast(device, enabled=False)


class Routing(NamedTuple):
    """The weights that read, mix and write one token's streams.

    Orientation, here and everywhere in this library: `H'[m] = sum_n res[m, n] H[n] + post[m] y`.
    Row m of `res` says where output stream m comes from. Several public implementations apply the
    transpose; `temper.convert` transposes on the way in and out, nothing else does.

    Shape:
        pre: (..., N), the weights that read the branch input `x = sum_n pre[n] H[n]`.
        res: (..., M, N), the mixing matrix, M = N.
        post: (..., M), the weights that write the branch output to every stream.
    """

    pre: Tensor
    res: Tensor
    post: Tensor
