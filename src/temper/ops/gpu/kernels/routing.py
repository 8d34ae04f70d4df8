"""Everything small: from bottleneck rows to routing weights and back, and mixers by themselves.

A head (pre, res or post) is six numbers, HEAD: where its bottleneck rows start, how many there are, where its output
map starts, where its logits start, how many there are, and whether the rows are the logits themselves.
MIXER is (L, LP, whether the logits are a matrix); SETTINGS are in `mixers`.
"""

import triton
import triton.language as tl


@triton.jit
def places(N: tl.constexpr, NP: tl.constexpr, MIXER: tl.constexpr):
    """Which logit each of the LP places holds, and whether it holds one."""
    at = tl.arange(0, MIXER[1])
    if MIXER[2]:
        place = (at // NP) * N + at % NP
        known = (at // NP < N) & (at % NP < N)
    else:
        place = at
        known = at < MIXER[0]
    return place, known


@triton.jit
def add_splits(parts, column, fits, t, T, S, R, WIDE: tl.constexpr):
    """Columns of (S, T, R), summed over the splits in their order."""
    total = tl.zeros(fits.shape, WIDE)
    for s in range(S):
        total += tl.load(parts + (s * T + t[:, None]) * R + column[None, :], mask=fits, other=0.0)
    return total


@triton.jit
def bottleneck(
    parts,
    z,
    place,
    known,
    t,
    keep,
    T,
    S,
    R,
    HEAD: tl.constexpr,
    RP: tl.constexpr,
    KEEP: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The rows of a head before the norm, one for each logit if they are the logits; saved in z on request."""
    if HEAD[5]:
        column = HEAD[0] + place
        fits = keep[:, None] & known[None, :]
    else:
        r = tl.arange(0, RP)
        column = HEAD[0] + r
        fits = keep[:, None] & (r < HEAD[1])[None, :]
    rows = add_splits(parts, column, fits, t, T, S, R, WIDE)
    if KEEP:
        tl.store(z + t[:, None] * R + column[None, :], rows, mask=fits)
    return rows


@triton.jit
def head_logits(rows, out, bias, place, known, HEAD: tl.constexpr, RP: tl.constexpr):
    """The logits from normed rows."""
    logits = tl.load(bias + HEAD[3] + place, mask=known, other=0.0)[None, :]
    if HEAD[5]:
        logits = logits + rows
    else:
        r = tl.arange(0, RP)[None, :]
        logits = logits + tl.zeros((rows.shape[0], place.shape[0]), rows.dtype)
        for k in range(HEAD[1]):
            row = tl.sum(tl.where(r == k, rows, 0.0), 1)
            line = tl.load(out + HEAD[2] + k * HEAD[4] + place, mask=known, other=0.0)
            logits += row[:, None] * line[None, :]
    return logits


@triton.jit
def vjp_head(d_logits, out, place, known, HEAD: tl.constexpr, RP: tl.constexpr):
    """The gradient of normed rows from that of the logits."""
    if HEAD[5]:
        rows = d_logits
    else:
        r = tl.arange(0, RP)[None, :]
        rows = tl.zeros((d_logits.shape[0], RP), d_logits.dtype)
        for k in range(HEAD[1]):
            line = tl.load(out + HEAD[2] + k * HEAD[4] + place, mask=known, other=0.0)
            rows = tl.where(r == k, tl.sum(d_logits * line[None, :], 1)[:, None], rows)
    return rows


@triton.jit
def store_rows(target, rows, place, known, t, keep, R, HEAD: tl.constexpr, RP: tl.constexpr):
    """The rows of a head into (T, R)."""
    if HEAD[5]:
        column = HEAD[0] + place
        fits = keep[:, None] & known[None, :]
    else:
        r = tl.arange(0, RP)
        column = HEAD[0] + r
        fits = keep[:, None] & (r < HEAD[1])[None, :]
    tl.store(target + t[:, None] * R + column[None, :], rows, mask=fits)


@triton.jit
def res_entries(t, keep, N: tl.constexpr, NP: tl.constexpr, STRIDE: tl.constexpr, FROM: tl.constexpr):
    """Where res (BT, NP, NP) stands in rows of STRIDE numbers, and which of its entries there are."""
    m = tl.arange(0, NP)[None, :, None]
    n = tl.arange(0, NP)[None, None, :]
    return t[:, None, None] * STRIDE + FROM + m * N + n, keep[:, None, None] & (m < N) & (n < N)


@triton.jit(do_not_specialize=["T", "S"])
def route(
    parts, squares, out, bias, table, z, norms, weights, T, S, R, F,
    NORM_EPS: tl.constexpr, CLAMP: tl.constexpr, PRE_EPS: tl.constexpr,
    PRE: tl.constexpr, RES: tl.constexpr, POST: tl.constexpr, RP: tl.constexpr,
    SOLVE: tl.constexpr, MIXER: tl.constexpr, SETTINGS: tl.constexpr,
    N: tl.constexpr, NP: tl.constexpr, WIDE: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Norm, logits, gates and mixing of BT tokens."""
    K: tl.constexpr = N * N + 2 * N
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    keep = t < T
    t = t.to(tl.int64)
    mean = tl.zeros((BT,), WIDE)
    for s in range(S):
        mean += tl.load(squares + s * T + t, mask=keep, other=1.0)
    mean = mean / F
    # A bare literal would be float32.
    least = tl.full((1,), NORM_EPS, WIDE)
    if CLAMP:
        rstd = 1.0 / tl.sqrt(tl.maximum(mean, least))
        slope = tl.where(mean < least, 0.0, -rstd * rstd * rstd / F)
    else:
        rstd = 1.0 / tl.sqrt(mean + least)
        slope = -rstd * rstd * rstd / F
    tl.store(norms + t * 2, rstd, mask=keep)
    tl.store(norms + t * 2 + 1, slope, mask=keep)
    scale = rstd[:, None]
    n = tl.arange(0, NP)
    here = n < N
    some = keep[:, None] & here[None, :]
    row = weights + t[:, None] * K + n[None, :]
    rows = bottleneck(parts, z, n, here, t, keep, T, S, R, PRE, RP[0], True, WIDE)
    logits = head_logits(rows * scale, out, bias, n, here, PRE, RP[0])
    tl.store(row, 1.0 / (1.0 + tl.exp(-logits)) + PRE_EPS, mask=some)
    rows = bottleneck(parts, z, n, here, t, keep, T, S, R, POST, RP[2], True, WIDE)
    logits = head_logits(rows * scale, out, bias, n, here, POST, RP[2])
    tl.store(row + N + N * N, 2.0 / (1.0 + tl.exp(-logits)), mask=some)
    place, known = places(N, NP, MIXER)
    rows = bottleneck(parts, z, place, known, t, keep, T, S, R, RES, RP[1], True, WIDE)
    logits = head_logits(rows * scale, out, bias, place, known, RES, RP[1])
    entry, fits = res_entries(t, keep, N, NP, K, N)
    tl.store(weights + entry, SOLVE(logits, table, N, NP, SETTINGS), mask=fits)


@triton.jit(do_not_specialize=["T"])
def route_backward(
    d_weights, d_pre, weights, z, norms, out, bias, table, d_logits, d_z, own, T, R,
    HAS_WEIGHTS: tl.constexpr, HAS_X: tl.constexpr, PRE_EPS: tl.constexpr,
    PRE: tl.constexpr, RES: tl.constexpr, POST: tl.constexpr, RP: tl.constexpr,
    VJP: tl.constexpr, MIXER: tl.constexpr, SETTINGS: tl.constexpr,
    N: tl.constexpr, NP: tl.constexpr, WIDE: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """The gradients of the logits and of z, and the factor of the streams in their own gradient."""
    K: tl.constexpr = N * N + 2 * N
    L: tl.constexpr = MIXER[0] + 2 * N
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    keep = t < T
    t = t.to(tl.int64)
    rstd = tl.load(norms + t * 2, mask=keep, other=0.0)
    slope = tl.load(norms + t * 2 + 1, mask=keep, other=0.0)
    scale = rstd[:, None]
    n = tl.arange(0, NP)
    here = n < N
    some = keep[:, None] & here[None, :]
    row = t[:, None] * K + n[None, :]
    # pre
    grad = tl.zeros((BT, NP), WIDE)
    if HAS_WEIGHTS:
        grad += tl.load(d_weights + row, mask=some, other=0.0)
    if HAS_X:
        grad += tl.load(d_pre + t[:, None] * N + n[None, :], mask=some, other=0.0)
    gate = tl.load(weights + row, mask=some, other=0.0) - PRE_EPS
    grad = tl.where(some, grad * gate * (1.0 - gate), 0.0)
    tl.store(d_logits + t[:, None] * L + n[None, :], grad, mask=some)
    rows = bottleneck(z, z, n, here, t, keep, T, 1, R, PRE, RP[0], False, WIDE)
    d_rows = vjp_head(grad, out, n, here, PRE, RP[0])
    store_rows(d_z, d_rows * scale, n, here, t, keep, R, PRE, RP[0])
    total = tl.sum(d_rows * rows, 1)
    # post
    grad = tl.zeros((BT, NP), WIDE)
    if HAS_WEIGHTS:
        grad += tl.load(d_weights + row + N + N * N, mask=some, other=0.0)
    gate = tl.load(weights + row + N + N * N, mask=some, other=0.0)
    grad = grad * gate * (1.0 - 0.5 * gate)
    tl.store(d_logits + t[:, None] * L + N + MIXER[0] + n[None, :], grad, mask=some)
    rows = bottleneck(z, z, n, here, t, keep, T, 1, R, POST, RP[2], False, WIDE)
    d_rows = vjp_head(grad, out, n, here, POST, RP[2])
    store_rows(d_z, d_rows * scale, n, here, t, keep, R, POST, RP[2])
    total += tl.sum(d_rows * rows, 1)
    # res
    place, known = places(N, NP, MIXER)
    rows = bottleneck(z, z, place, known, t, keep, T, 1, R, RES, RP[1], False, WIDE)
    logits = head_logits(rows * scale, out, bias, place, known, RES, RP[1])
    entry, fits = res_entries(t, keep, N, NP, K, N)
    res = tl.load(weights + entry, mask=fits, other=0.0)
    grad = tl.zeros((BT, NP, NP), WIDE)
    if HAS_WEIGHTS:
        grad += tl.load(d_weights + entry, mask=fits, other=0.0)
    grad = VJP(logits, res, grad, table, N, NP, SETTINGS)
    tl.store(d_logits + t[:, None] * L + N + place[None, :], grad, mask=keep[:, None] & known[None, :])
    d_rows = vjp_head(grad, out, place, known, RES, RP[1])
    store_rows(d_z, d_rows * scale, place, known, t, keep, R, RES, RP[1])
    total += tl.sum(d_rows * rows, 1)
    tl.store(own + t, total * slope, mask=keep)


@triton.jit(do_not_specialize=["T", "TILES"])
def heads_backward(
    z, norms, d_logits, parts, T, R, L, TILES,
    WIDE: tl.constexpr, EXACT: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """A share of the gradients of the output maps and biases: normed rows, and a row of ones, times d_logits.

    (R + 1, L) for all heads at once; blocks that belong to no head are not used.
    """
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    column = tl.program_id(1) * BL + tl.arange(0, BL)
    p = tl.program_id(2)
    total = tl.zeros((BR, BL), WIDE)
    for i in range(TILES):
        t = (p * TILES + i) * BT + tl.arange(0, BT)
        keep = t < T
        t = t.to(tl.int64)
        rstd = tl.load(norms + t * 2, mask=keep, other=0.0)
        rows = tl.load(z + t[None, :] * R + r[:, None], mask=keep[None, :] & (r < R)[:, None], other=0.0)
        rows = tl.where((r < R)[:, None], rows * rstd[None, :], 1.0)
        grad = tl.load(
            d_logits + t[:, None] * L + column[None, :], mask=keep[:, None] & (column < L)[None, :], other=0.0
        )
        total = tl.dot(rows, grad, total, input_precision=EXACT, out_dtype=WIDE)
    place = (p * (R + 1) + r[:, None]) * L + column[None, :]
    tl.store(parts + place, total, mask=(r < R + 1)[:, None] & (column < L)[None, :])


@triton.jit
def add_head(parts, d_out, row, P, R, L, HEAD: tl.constexpr, LP: tl.constexpr, WIDE: tl.constexpr):
    """One row of the gradient of a head's output map: the shares of heads_backward in their order."""
    at = tl.arange(0, LP)
    mine = at < HEAD[4]
    total = tl.zeros((LP,), WIDE)
    for p in range(P):
        total += tl.load(parts + (p * (R + 1) + HEAD[0] + row) * L + HEAD[3] + at, mask=mine, other=0.0)
    tl.store(d_out + HEAD[2] + row * HEAD[4] + at, total, mask=mine)


@triton.jit(do_not_specialize=["P"])
def add_heads(
    parts, d_out, d_bias, P, R, L,
    PRE: tl.constexpr, RES: tl.constexpr, POST: tl.constexpr, WIDE: tl.constexpr, LP: tl.constexpr,
):  # fmt: skip
    """The gradients of output maps and biases from their shares (P, R + 1, L), of which other blocks are not used."""
    r = tl.program_id(0)
    if r == R:
        at = tl.arange(0, LP)
        total = tl.zeros((LP,), WIDE)
        for p in range(P):
            total += tl.load(parts + (p * (R + 1) + R) * L + at, mask=at < L, other=0.0)
        tl.store(d_bias + at, total, mask=at < L)
    elif r < RES[0]:
        if not PRE[5]:
            add_head(parts, d_out, r, P, R, L, PRE, LP, WIDE)
    elif r < POST[0]:
        if not RES[5]:
            add_head(parts, d_out, r - RES[0], P, R, L, RES, LP, WIDE)
    else:
        if not POST[5]:
            add_head(parts, d_out, r - POST[0], P, R, L, POST, LP, WIDE)


@triton.jit(do_not_specialize=["T"])
def mix(
    logits, table, res, T,
    SOLVE: tl.constexpr, MIXER: tl.constexpr, SETTINGS: tl.constexpr,
    N: tl.constexpr, NP: tl.constexpr, WIDE: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """A mixer by itself."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    keep = t < T
    t = t.to(tl.int64)
    place, known = places(N, NP, MIXER)
    inside = keep[:, None] & known[None, :]
    x = tl.load(logits + t[:, None] * MIXER[0] + place[None, :], mask=inside, other=0.0).to(WIDE)
    entry, fits = res_entries(t, keep, N, NP, N * N, 0)
    tl.store(res + entry, SOLVE(x, table, N, NP, SETTINGS).to(res.dtype.element_ty), mask=fits)


@triton.jit(do_not_specialize=["T"])
def mix_backward(
    logits, table, res, grad, d_logits, T,
    VJP: tl.constexpr, MIXER: tl.constexpr, SETTINGS: tl.constexpr,
    N: tl.constexpr, NP: tl.constexpr, WIDE: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """The gradient of a mixer's logits."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    keep = t < T
    t = t.to(tl.int64)
    place, known = places(N, NP, MIXER)
    fits = keep[:, None] & known[None, :]
    x = tl.load(logits + t[:, None] * MIXER[0] + place[None, :], mask=fits, other=0.0).to(WIDE)
    entry, there = res_entries(t, keep, N, NP, N * N, 0)
    p = tl.load(res + entry, mask=there, other=0.0).to(WIDE)
    slope = tl.load(grad + entry, mask=there, other=0.0).to(WIDE)
    gradient = VJP(x, p, slope, table, N, NP, SETTINGS).to(d_logits.dtype.element_ty)
    tl.store(d_logits + t[:, None] * MIXER[0] + place[None, :], gradient, mask=fits)
