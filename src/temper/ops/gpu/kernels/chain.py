"""`finish` of one site and `begin` of the next in one pass over the streams, and both backwards in one."""

import triton
import triton.language as tl

from temper.ops.gpu.kernels.streams import diagonal_blocks, group_rows, through_maps, wide_dot


@triton.jit(do_not_specialize=["T"])
def write_project(
    streams, y, weights, maps, out, z, squares, T, D, R,
    CHUNK: tl.constexpr, N: tl.constexpr, NP: tl.constexpr,
    HALF: tl.constexpr, WIDE: tl.constexpr, EXACT: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr, RP: tl.constexpr,
):  # fmt: skip
    """`write_rows`, and a share of the next z and sum of squares: CHUNK features of every stream. For up to RP rows.

    `out` may be the streams.
    """
    G: tl.constexpr = BT * NP // 16
    first = tl.program_id(0) * BT
    s = tl.program_id(1)
    r = tl.arange(0, RP)
    token = first + tl.arange(0, BT)
    t, n = group_rows(first, G, NP)
    held = (t < T) & (n < N)
    blocks = diagonal_blocks(weights, t, n, held, N, NP, False)
    post = tl.load(weights + t * (N * N + 2 * N) + N + N * N + n, mask=held, other=0.0)
    c = tl.arange(0, NP * BD)
    rows = tl.zeros((BT, RP), WIDE)
    square = tl.zeros((BT, NP * BD), WIDE)
    for d0 in range(s * CHUNK, min(s * CHUNK + CHUNK, D), BD):
        d = d0 + tl.arange(0, BD)[None, None, :]
        inside = held & (d < D)
        h = tl.load(streams + (t * N + n) * D + d, mask=inside, other=0.0)
        branch = tl.load(y + t * D + d, mask=inside, other=0.0).to(WIDE)
        total = wide_dot(blocks, h, post * branch, HALF, WIDE, EXACT)
        # Rounded to the stored dtype, as the next site would read it.
        value = total.to(out.dtype.element_ty)
        tl.store(out + (t * N + n) * D + d, value, mask=inside)
        flat = tl.reshape(value, (BT, NP * BD))
        wide = flat.to(WIDE)
        square += wide * wide
        place = r[None, :] * (N * D) + ((c // BD) * D + d0 + c % BD)[:, None]
        fits = (r < R)[None, :] & ((c // BD < N) & (d0 + c % BD < D))[:, None]
        rows = tl.dot(flat, tl.load(maps + place, mask=fits, other=0.0), rows, input_precision=EXACT, out_dtype=WIDE)
        if HALF:
            bottom = tl.load(maps + R * (N * D) + place, mask=fits, other=0.0)
            rows = tl.dot(flat, bottom, rows, input_precision="ieee", out_dtype=WIDE)
    s = s.to(tl.int64)
    keep = token < T
    tl.store(z + (s * T + token[:, None]) * R + r[None, :], rows, mask=keep[:, None] & (r < R)[None, :])
    tl.store(squares + s * T + token, tl.sum(square, 1), mask=keep)


@triton.jit(do_not_specialize=["T"])
def streams_write_backward(
    grad, d_x, d_z, own, following, maps, next_weights, d_next, streams, y, weights, d_y, d_weights, T, D, R,
    HAS_GRAD: tl.constexpr, HAS_X: tl.constexpr,
    N: tl.constexpr, NP: tl.constexpr, HALF: tl.constexpr, WIDE: tl.constexpr, EXACT: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr, RP: tl.constexpr,
):  # fmt: skip
    """`streams_backward` of the later site, and on what it gives `write_backward` of the earlier one, for BT tokens."""
    G: tl.constexpr = BT * NP // 16
    K: tl.constexpr = N * N + 2 * N
    first = tl.program_id(0) * BT
    t, n = group_rows(first, G, NP)
    held = (t < T) & (n < N)
    if HAS_GRAD:
        blocks = diagonal_blocks(next_weights, t, n, held, N, NP, True)
    share = tl.load(own + t, mask=t < T, other=0.0)
    pre = tl.load(next_weights + t * K + n, mask=held, other=0.0)
    post = tl.load(weights + t * K + N + N * N + n, mask=held, other=0.0)
    token = first.to(tl.int64) + tl.arange(0, BT)[:, None]
    pairs = tl.zeros((G, 16, 16), WIDE)
    last = tl.zeros((G, 16, BD), WIDE)
    for d0 in range(0, D, BD):
        d = d0 + tl.arange(0, BD)[None, None, :]
        inside = held & (d < D)
        place = (t * N + n) * D + d
        total = through_maps(d_z, maps, first, d0, T, D, R, N, NP, HALF, WIDE, EXACT, BT, BD, RP)
        if HAS_GRAD:
            total = wide_dot(blocks, tl.load(grad + place, mask=inside, other=0.0), total, HALF, WIDE, EXACT)
        total += share * tl.load(following + place, mask=inside, other=0.0).to(WIDE)
        if HAS_X:
            total += pre * tl.load(d_x + t * D + d, mask=inside, other=0.0).to(WIDE)
        value = total.to(d_next.dtype.element_ty)
        tl.store(d_next + place, value, mask=inside)
        h = tl.load(streams + place, mask=inside, other=0.0)
        pairs = tl.dot(value, tl.permute(h, (0, 2, 1)), pairs, input_precision=EXACT, out_dtype=WIDE)
        rounded = value.to(WIDE)
        last += rounded * tl.load(y + t * D + d, mask=inside, other=0.0).to(WIDE)
        branch = tl.sum(tl.reshape(post * rounded, (BT, NP, BD)), 1)
        column = d0 + tl.arange(0, BD)[None, :]
        tl.store(d_y + token * D + column, branch.to(d_y.dtype.element_ty), mask=(token < T) & (column < D))
    i = tl.arange(0, 16)[None, :, None]
    j = tl.arange(0, 16)[None, None, :]
    same = (i // NP == j // NP) & (j % NP < N)
    tl.store(d_weights + t * K + N + n * N + j % NP, pairs, mask=held & same)
    tl.store(d_weights + t * K + N + N * N + n, tl.sum(last, 2, keep_dims=True), mask=held)
    tl.store(d_weights + t * K + n, tl.zeros((G, 16, 1), WIDE), mask=held)
