"""The operations that touch streams, written plainly: the oracle for every faster path.

Letters: N streams, M destination streams, D features, R bottleneck rows. Everything is computed in
the dtype of the streams: widen them first.
"""

from __future__ import annotations

from torch import Tensor


def project(streams: Tensor, in_map: Tensor, rstd: Tensor) -> Tensor:
    """The bottleneck of normed streams: out[r] = sum_{n,d} rstd H[n, d] in_map[r, n, d].

    Shape:
        streams: (..., N, D), in_map: (R, N, D), rstd: (..., 1, 1) or (..., N, 1) -> (..., R).
    """
    weight = in_map.flatten(1).T
    if rstd.shape[-2] == 1:
        # One scale per token leaves the sum: the streams are read once and never copied.
        return (streams.flatten(-2) @ weight) * rstd.squeeze(-1)
    return (streams * rstd).flatten(-2) @ weight


def read(streams: Tensor, pre: Tensor) -> Tensor:
    """x = sum_n pre[n] H[n]: (..., N, D), (..., N) -> (..., D)."""
    return (pre.to(streams.dtype).unsqueeze(-2) @ streams).squeeze(-2)


def write(streams: Tensor, y: Tensor, res: Tensor, post: Tensor) -> Tensor:
    """H'[m] = sum_n res[m, n] H[n] + post[m] y: (..., N, D), (..., D), (..., M, N), (..., M) -> (..., M, D)."""
    dtype = streams.dtype
    return res.to(dtype) @ streams + post.to(dtype).unsqueeze(-1) * y.to(dtype).unsqueeze(-2)
