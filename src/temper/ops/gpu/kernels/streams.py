"""Everything that touches streams, each kernel in one pass.

HALF says that streams are bfloat16. Products then run on tensor cores with the other factor as a sum of two
bfloat16 numbers, so that they are exact to 2^-17; EXACT is the precision of products of other dtypes.

Groups of 16 rows: where a matrix product mixes streams, the NP rows of 16 / NP tokens stand below each other, with
their mixing matrices as blocks on the diagonal of a 16 x 16 matrix. The same code then serves every N up to 16.
"""

import triton
import triton.language as tl


@triton.jit
def wide_dot(left, right, total, HALF: tl.constexpr, WIDE: tl.constexpr, EXACT: tl.constexpr):
    """total + left right, for a left side in WIDE and a right side as streams are stored."""
    if HALF:
        high = left.to(tl.bfloat16)
        total = tl.dot(high, right, total, input_precision="ieee", out_dtype=WIDE)
        total = tl.dot((left - high.to(WIDE)).to(tl.bfloat16), right, total, input_precision="ieee", out_dtype=WIDE)
    else:
        total = tl.dot(left, right, total, input_precision=EXACT, out_dtype=WIDE)
    return total


@triton.jit
def split_maps(maps, parts, SIZE, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Maps as two bfloat16 parts, the second holding what the first leaves."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(maps + i, mask=i < SIZE, other=0.0)
    high = value.to(tl.bfloat16)
    tl.store(parts + i, high, mask=i < SIZE)
    tl.store(parts + SIZE + i, (value - high.to(WIDE)).to(tl.bfloat16), mask=i < SIZE)


@triton.jit(do_not_specialize=["T"])
def project(
    streams, maps, z, squares, T, R, F, BLOCKS,
    CHUNK: tl.constexpr, HALF: tl.constexpr, WIDE: tl.constexpr, EXACT: tl.constexpr,
    BT: tl.constexpr, BF: tl.constexpr, RP: tl.constexpr,
):  # fmt: skip
    """A share of z = H . in_map and of the sum of squares: BT tokens, one of the chunks of the F features, RP rows.

    Blocks of rows are neighbours, so that they read the same streams at the same time.
    """
    block = tl.program_id(0) % BLOCKS
    t = tl.program_id(0) // BLOCKS * BT + tl.arange(0, BT)
    s = tl.program_id(1)
    keep = t < T
    row = t.to(tl.int64) * F
    r = block * RP + tl.arange(0, RP)
    total = tl.zeros((BT, RP), WIDE)
    square = tl.zeros((BT, BF), WIDE)
    for f0 in range(s * CHUNK, min(s * CHUNK + CHUNK, F), BF):
        f = f0 + tl.arange(0, BF)
        h = tl.load(streams + row[:, None] + f[None, :], mask=keep[:, None] & (f < F)[None, :], other=0.0)
        place = r[None, :] * F + f[:, None]
        fits = (r < R)[None, :] & (f < F)[:, None]
        total = tl.dot(h, tl.load(maps + place, mask=fits, other=0.0), total, input_precision=EXACT, out_dtype=WIDE)
        if HALF:
            total = tl.dot(
                h, tl.load(maps + R * F + place, mask=fits, other=0.0), total, input_precision="ieee", out_dtype=WIDE
            )
        wide = h.to(WIDE)
        square += wide * wide
    s = s.to(tl.int64)
    tl.store(z + (s * T + t[:, None]) * R + r[None, :], total, mask=keep[:, None] & (r < R)[None, :])
    # Every block of rows computes the same sum of squares; the first one stores it.
    tl.store(squares + s * T + t, tl.sum(square, 1), mask=keep & (block == 0))


@triton.jit(do_not_specialize=["T"])
def read(streams, weights, x, T, D, N: tl.constexpr, WIDE: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    """x = sum_n pre[n] H[n]."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    keep = t < T
    inside = keep[:, None] & (d < D)[None, :]
    t = t.to(tl.int64)
    total = tl.zeros((BT, BD), WIDE)
    for n in tl.static_range(N):
        h = tl.load(streams + (t[:, None] * N + n) * D + d[None, :], mask=inside, other=0.0).to(WIDE)
        total += tl.load(weights + t * (N * N + 2 * N) + n, mask=keep, other=0.0)[:, None] * h
    tl.store(x + t[:, None] * D + d[None, :], total.to(x.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["T"])
def write(streams, y, weights, out, T, D, N: tl.constexpr, WIDE: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    """H'[m] = sum_n res[m, n] H[n] + post[m] y, for N up to 8: its code grows with N^2. `out` may be the streams."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    keep = t < T
    inside = keep[:, None] & (d < D)[None, :]
    t = t.to(tl.int64)
    w = weights + t * (N * N + 2 * N)
    branch = tl.load(y + t[:, None] * D + d[None, :], mask=inside, other=0.0).to(WIDE)
    rows = ()
    for n in tl.static_range(N):
        rows = rows + (tl.load(streams + (t[:, None] * N + n) * D + d[None, :], mask=inside, other=0.0).to(WIDE),)
    for m in tl.static_range(N):
        total = tl.load(w + N + N * N + m, mask=keep, other=0.0)[:, None] * branch
        for n in tl.static_range(N):
            total += tl.load(w + N + m * N + n, mask=keep, other=0.0)[:, None] * rows[n]
        tl.store(out + (t[:, None] * N + m) * D + d[None, :], total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def group_rows(first, G: tl.constexpr, NP: tl.constexpr):
    """The tokens and the streams of G groups of 16 rows from token `first` on: (G, 16, 1)."""
    q = tl.arange(0, G)[:, None, None] * 16 + tl.arange(0, 16)[None, :, None]
    return first.to(tl.int64) + q // NP, q % NP


@triton.jit
def diagonal_blocks(weights, t, n, held, N: tl.constexpr, NP: tl.constexpr, TURN: tl.constexpr):
    """res, or its transpose, of every group as blocks on the diagonal of a 16 x 16 matrix: (G, 16, 16)."""
    i = tl.arange(0, 16)[None, :, None]
    j = tl.arange(0, 16)[None, None, :]
    other = j % NP
    entry = other * N + n if TURN else n * N + other
    same = (i // NP == j // NP) & (other < N)
    return tl.load(weights + t * (N * N + 2 * N) + N + entry, mask=held & same, other=0.0)


@triton.jit(do_not_specialize=["T"])
def write_rows(
    streams, y, weights, out, T, D,
    N: tl.constexpr, NP: tl.constexpr, HALF: tl.constexpr, WIDE: tl.constexpr, EXACT: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """`write` by matrix products on groups of 16 rows. `out` may be the streams."""
    t, n = group_rows(tl.program_id(0) * BT, BT * NP // 16, NP)
    d = (tl.program_id(1) * BD + tl.arange(0, BD))[None, None, :]
    held = (t < T) & (n < N)
    inside = held & (d < D)
    h = tl.load(streams + (t * N + n) * D + d, mask=inside, other=0.0)
    total = tl.zeros((BT * NP // 16, 16, BD), WIDE)
    total = wide_dot(diagonal_blocks(weights, t, n, held, N, NP, False), h, total, HALF, WIDE, EXACT)
    branch = tl.load(y + t * D + d, mask=inside, other=0.0).to(WIDE)
    total += tl.load(weights + t * (N * N + 2 * N) + N + N * N + n, mask=held, other=0.0) * branch
    tl.store(out + (t * N + n) * D + d, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["T"])
def write_backward(
    grad, streams, y, weights, d_y, d_weights, T, D,
    N: tl.constexpr, WIDE: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """d_y, d_res and d_post of BT tokens, for N up to 4: products stay separate until the end."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    keep = t < T
    t = t.to(tl.int64)
    K: tl.constexpr = N * N + 2 * N
    post = ()
    sums = ()
    for m in tl.static_range(N):
        post = post + (tl.load(weights + t * K + N + N * N + m, mask=keep, other=0.0)[:, None],)
    for _ in tl.static_range(N * N + N):
        sums = sums + (tl.zeros((BT, BD), WIDE),)
    for d0 in range(0, D, BD):
        d = d0 + tl.arange(0, BD)
        inside = keep[:, None] & (d < D)[None, :]
        branch = tl.load(y + t[:, None] * D + d[None, :], mask=inside, other=0.0).to(WIDE)
        rows = ()
        for n in tl.static_range(N):
            rows = rows + (tl.load(streams + (t[:, None] * N + n) * D + d[None, :], mask=inside, other=0.0).to(WIDE),)
        total = tl.zeros((BT, BD), WIDE)
        more = ()
        for m in tl.static_range(N):
            g = tl.load(grad + (t[:, None] * N + m) * D + d[None, :], mask=inside, other=0.0).to(WIDE)
            total += post[m] * g
            for n in tl.static_range(N):
                more = more + (sums[m * (N + 1) + n] + g * rows[n],)
            more = more + (sums[m * (N + 1) + N] + g * branch,)
        sums = more
        tl.store(d_y + t[:, None] * D + d[None, :], total.to(d_y.dtype.element_ty), mask=inside)
    for m in tl.static_range(N):
        tl.store(d_weights + t * K + m, tl.zeros((BT,), WIDE), mask=keep)
        for n in tl.static_range(N):
            tl.store(d_weights + t * K + N + m * N + n, tl.sum(sums[m * (N + 1) + n], 1), mask=keep)
        tl.store(d_weights + t * K + N + N * N + m, tl.sum(sums[m * (N + 1) + N], 1), mask=keep)


@triton.jit(do_not_specialize=["T"])
def write_backward_dot(
    grad, streams, y, weights, d_y, d_weights, T, D,
    N: tl.constexpr, NP: tl.constexpr, WIDE: tl.constexpr, EXACT: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """The same for larger N: all pairs of the BT * NP rows of G and H in one matrix product, whose blocks are used."""
    K: tl.constexpr = N * N + 2 * N
    first = tl.program_id(0) * BT
    t = first + tl.arange(0, BT)
    keep = t < T
    t = t.to(tl.int64)
    q = tl.arange(0, BT * NP)
    row = (first.to(tl.int64) + q // NP) * N + q % NP
    held = (first + q // NP < T) & (q % NP < N)
    post = ()
    last = ()
    for m in tl.static_range(N):
        post = post + (tl.load(weights + t * K + N + N * N + m, mask=keep, other=0.0)[:, None],)
        last = last + (tl.zeros((BT, BD), WIDE),)
    pairs = tl.zeros((BT * NP, BT * NP), WIDE)
    for d0 in range(0, D, BD):
        d = d0 + tl.arange(0, BD)
        inside = keep[:, None] & (d < D)[None, :]
        both = held[:, None] & (d < D)[None, :]
        g = tl.load(grad + row[:, None] * D + d[None, :], mask=both, other=0.0)
        h = tl.load(streams + row[:, None] * D + d[None, :], mask=both, other=0.0)
        pairs = tl.dot(g, tl.trans(h), pairs, input_precision=EXACT, out_dtype=WIDE)
        branch = tl.load(y + t[:, None] * D + d[None, :], mask=inside, other=0.0).to(WIDE)
        total = tl.zeros((BT, BD), WIDE)
        more = ()
        for m in tl.static_range(N):
            line = tl.load(grad + (t[:, None] * N + m) * D + d[None, :], mask=inside, other=0.0).to(WIDE)
            total += post[m] * line
            more = more + (last[m] + line * branch,)
        last = more
        tl.store(d_y + t[:, None] * D + d[None, :], total.to(d_y.dtype.element_ty), mask=inside)
    i = tl.arange(0, BT)
    m = tl.arange(0, NP)[None, :, None]
    n = tl.arange(0, NP)[None, None, :]
    own = (i[:, None, None, None] == i[None, None, :, None]).to(WIDE)
    blocks = tl.sum(tl.reshape(pairs, (BT, NP, BT, NP)) * own, 2)
    place = t[:, None, None] * K + N + m * N + n
    tl.store(d_weights + place, blocks, mask=keep[:, None, None] & (m < N) & (n < N))
    for k in tl.static_range(N):
        tl.store(d_weights + t * K + k, tl.zeros((BT,), WIDE), mask=keep)
        tl.store(d_weights + t * K + N + N * N + k, tl.sum(last[k], 1), mask=keep)


@triton.jit(do_not_specialize=["T"])
def read_backward(d_x, streams, d_pre, T, D, N: tl.constexpr, WIDE: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    """d_pre[n] = <d_x, H[n]>."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    keep = t < T
    t = t.to(tl.int64)
    sums = ()
    for _ in tl.static_range(N):
        sums = sums + (tl.zeros((BT, BD), WIDE),)
    for d0 in range(0, D, BD):
        d = d0 + tl.arange(0, BD)
        inside = keep[:, None] & (d < D)[None, :]
        g = tl.load(d_x + t[:, None] * D + d[None, :], mask=inside, other=0.0).to(WIDE)
        more = ()
        for n in tl.static_range(N):
            h = tl.load(streams + (t[:, None] * N + n) * D + d[None, :], mask=inside, other=0.0).to(WIDE)
            more = more + (sums[n] + g * h,)
        sums = more
    for n in tl.static_range(N):
        tl.store(d_pre + t * N + n, tl.sum(sums[n], 1), mask=keep)


@triton.jit
def through_maps(
    d_z, maps, first, d0, T, D, R,
    N: tl.constexpr, NP: tl.constexpr, HALF: tl.constexpr, WIDE: tl.constexpr, EXACT: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr, RP: tl.constexpr,
):  # fmt: skip
    """The gradient of the streams through the maps, d_z . in_map, in groups of 16 rows: (G, 16, BD)."""
    t = first + tl.arange(0, BT)
    c = tl.arange(0, NP * BD)
    column = (c // BD) * D + d0 + c % BD
    known = (c // BD < N) & (d0 + c % BD < D)
    total = tl.zeros((BT, NP * BD), WIDE)
    for r0 in range(0, R, RP):
        r = r0 + tl.arange(0, RP)
        line = t[:, None].to(tl.int64) * R + r[None, :]
        dz = tl.load(d_z + line, mask=(t < T)[:, None] & (r < R)[None, :], other=0.0)
        place = r[:, None] * (N * D) + column[None, :]
        fits = (r < R)[:, None] & known[None, :]
        top = tl.load(maps + place, mask=fits, other=0.0)
        total = wide_dot(dz, top, total, HALF, WIDE, EXACT)
        if HALF:
            bottom = tl.load(maps + R * (N * D) + place, mask=fits, other=0.0)
            total = tl.dot(dz.to(tl.bfloat16), bottom, total, input_precision="ieee", out_dtype=WIDE)
    return tl.reshape(total, (BT * NP // 16, 16, BD))


@triton.jit(do_not_specialize=["T", "TILES"])
def streams_backward(
    grad, d_x, d_z, own, streams, maps, weights, d_streams, parts, T, D, R, TILES,
    HAS_GRAD: tl.constexpr, HAS_X: tl.constexpr, HAS_PARTS: tl.constexpr,
    N: tl.constexpr, NP: tl.constexpr, HALF: tl.constexpr, WIDE: tl.constexpr, EXACT: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr, RP: tl.constexpr,
):  # fmt: skip
    """All parts of d_streams: through mixing, the maps, the norm and reading. BD features, TILES tiles of BT tokens.

    With HAS_PARTS also what `maps_backward` does, for up to RP rows, without reading the streams again.
    """
    p = tl.program_id(0)
    d0 = tl.program_id(1) * BD
    d = d0 + tl.arange(0, BD)[None, None, :]
    r = tl.arange(0, RP)
    total_maps = tl.zeros((RP, NP * BD), WIDE)
    for i in range(TILES):
        first = (p * TILES + i) * BT
        total = through_maps(d_z, maps, first, d0, T, D, R, N, NP, HALF, WIDE, EXACT, BT, BD, RP)
        t, n = group_rows(first, BT * NP // 16, NP)
        held = (t < T) & (n < N)
        inside = held & (d < D)
        place = (t * N + n) * D + d
        if HAS_GRAD:
            g = tl.load(grad + place, mask=inside, other=0.0)
            total = wide_dot(diagonal_blocks(weights, t, n, held, N, NP, True), g, total, HALF, WIDE, EXACT)
        h = tl.load(streams + place, mask=inside, other=0.0)
        total += h.to(WIDE) * tl.load(own + t, mask=t < T, other=0.0)
        if HAS_X:
            gx = tl.load(d_x + t * D + d, mask=inside, other=0.0).to(WIDE)
            total += tl.load(weights + t * (N * N + 2 * N) + n, mask=held, other=0.0) * gx
        tl.store(d_streams + place, total.to(d_streams.dtype.element_ty), mask=inside)
        if HAS_PARTS:
            token = first.to(tl.int64) + tl.arange(0, BT)
            dz = tl.load(d_z + token[None, :] * R + r[:, None], mask=(token < T)[None, :] & (r < R)[:, None], other=0.0)
            total_maps = wide_dot(dz, tl.reshape(h, (BT, NP * BD)), total_maps, HALF, WIDE, EXACT)
    if HAS_PARTS:
        c = tl.arange(0, NP * BD)
        at = (p.to(tl.int64) * R + r[:, None]) * (N * D) + ((c // BD) * D + d0 + c % BD)[None, :]
        tl.store(parts + at, total_maps, mask=(r < R)[:, None] & ((c // BD < N) & (d0 + c % BD < D))[None, :])


@triton.jit(do_not_specialize=["T", "TILES"])
def maps_backward(
    d_z, streams, parts, T, R, F, TILES, BLOCKS,
    HALF: tl.constexpr, WIDE: tl.constexpr, EXACT: tl.constexpr,
    BT: tl.constexpr, BF: tl.constexpr, RP: tl.constexpr,
):  # fmt: skip
    """A share of d_in_map = d_z^T H: BF of the F features, TILES tiles of BT tokens, RP rows."""
    f = tl.program_id(0) // BLOCKS * BF + tl.arange(0, BF)
    p = tl.program_id(1)
    r = tl.program_id(0) % BLOCKS * RP + tl.arange(0, RP)
    total = tl.zeros((RP, BF), WIDE)
    for i in range(TILES):
        t = (p * TILES + i) * BT + tl.arange(0, BT)
        keep = t < T
        t = t.to(tl.int64)
        dz = tl.load(d_z + t[None, :] * R + r[:, None], mask=keep[None, :] & (r < R)[:, None], other=0.0)
        h = tl.load(streams + t[:, None] * F + f[None, :], mask=keep[:, None] & (f < F)[None, :], other=0.0)
        total = wide_dot(dz, h, total, HALF, WIDE, EXACT)
    place = (p.to(tl.int64) * R + r[:, None]) * F + f[None, :]
    tl.store(parts + place, total, mask=(r < R)[:, None] & (f < F)[None, :])
