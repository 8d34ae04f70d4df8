"""The routing of a token, and the orientation of the mixing matrix."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


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
