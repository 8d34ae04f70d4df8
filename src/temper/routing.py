"""What a router decides for each token, and which way round the mixing matrix is."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Routing(NamedTuple):
    """How one token's streams are read, mixed and written.

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
