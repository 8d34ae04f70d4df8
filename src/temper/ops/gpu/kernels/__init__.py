"""Triton kernels: nothing but `@triton.jit` functions, which need triton to be imported.

Rules that all of them keep (docs/gpu.md):
* no atomics; sums follow from the shape and the tiles; no kernel reads what it wrote;
* offsets of tokens are 64-bit; values are widened right after they are loaded; every `tl.dot` says its precision;
* T and D are run-time numbers; N, the rows and the mixer are compiled in.

Letters: T tokens, N streams (NP padded to a power of two), D features, F = N D, R bottleneck rows, K = N^2 + 2N routing
weights of a token, L logits of res, BT / BD / BF tokens / features in a tile, WIDE the dtype of sums and of routing.
"""

import torch
import triton.language as tl

from temper.ops.gpu.kernels import chain, fold, routing, streams

KERNELS = {
    name: getattr(module, name)
    for module, names in (
        (fold, ("fold", "fold_backward", "fold_small_backward")),
        (chain, ("write_project", "streams_write_backward")),
        (routing, ("route", "route_backward", "heads_backward", "add_heads", "mix", "mix_backward")),
        (
            streams,
            (
                "split_maps",
                "project",
                "read",
                "write",
                "write_rows",
                "write_backward",
                "write_backward_dot",
                "read_backward",
                "streams_backward",
                "maps_backward",
            ),
        ),
    )
    for name in names
}
wide_types = {torch.float32: tl.float32, torch.float64: tl.float64}
