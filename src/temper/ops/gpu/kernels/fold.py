"""The weights of a site folded together, generators, gain and gates, and the gradients back.

Every generator's input map is in_map[r, n, d] = gain[n, d] * sum_j weight[r, n, j] line[r, j, d], where the lines hold
the one tensor with features in it and the weights come from the small ones.

A head is a tuple of seven tensors: the streams' factor, the core, the lines, the factors of the first and of the second
output mode, the gate and the bias; tensors that a generator lacks are None. HEAD has its numbers:
(kind, A, B, J, rows, first row, start of the map, first logit, O1, O2, second rank or bond, start of its sums, the
powers of two from B, O1, O2, Q1 and Q2 on), with kinds as in `temper.ops.plan.GENERATOR_KINDS`.
"""

import triton
import triton.language as tl

DENSE = tl.constexpr(0)
CP = tl.constexpr(1)
TUCKER = tl.constexpr(2)
TT = tl.constexpr(3)


@triton.jit
def weight_of(head, r, j, n, here, HEAD: tl.constexpr):
    """weight[r, :, j]: (NP,)."""
    left, core, line, x1, x2, gate, bias = head
    if HEAD[0] == CP:
        value = tl.load(left + n * HEAD[4] + r, mask=here, other=0.0)
    elif HEAD[0] == TT:
        value = tl.load(left + n * HEAD[1] + j, mask=here, other=0.0)
    else:
        value = tl.load(left + n * HEAD[1], mask=here, other=0.0) * tl.load(core + j * HEAD[4] + r)
        for a in range(1, HEAD[1]):
            entry = tl.load(core + (a * HEAD[2] + j) * HEAD[4] + r)
            value += tl.load(left + n * HEAD[1] + a, mask=here, other=0.0) * entry
    return value


@triton.jit
def line_of(head, r, j, d, known, D, HEAD: tl.constexpr):
    """line[r, j, :]: (BD,)."""
    left, core, line, x1, x2, gate, bias = head
    if HEAD[0] == CP:
        value = tl.load(line + d * HEAD[4] + r, mask=known, other=0.0)
    elif HEAD[0] == TT:
        value = tl.load(line + (j * D + d) * HEAD[4] + r, mask=known, other=0.0)
    else:
        value = tl.load(line + d * HEAD[2] + j, mask=known, other=0.0)
    return value


@triton.jit
def base_of(head, r, n, here, d, known, D, HEAD: tl.constexpr, WIDE: tl.constexpr):
    """in_map[r] before gain and gate: (NP, BD)."""
    left, core, line, x1, x2, gate, bias = head
    if HEAD[0] == DENSE:
        inside = here[:, None] & known[None, :]
        value = tl.load(line + (n[:, None] * D + d[None, :]) * HEAD[4] + r, mask=inside, other=0.0)
    else:
        value = tl.zeros((n.shape[0], d.shape[0]), WIDE)
        for j in range(HEAD[3]):
            weight = weight_of(head, r, j, n, here, HEAD)
            value += weight[:, None] * line_of(head, r, j, d, known, D, HEAD)[None, :]
    return value


@triton.jit
def gain_of(gains, n, here, d, known, D, GAIN: tl.constexpr, WIDE: tl.constexpr):
    """g as (NP, BD); with kinds as in `temper.norm.GAINS`."""
    first, second = gains
    if GAIN == 0:
        value = tl.load(first + n[:, None] * D + d[None, :], mask=here[:, None] & known[None, :], other=0.0)
    elif GAIN == 1:
        feature = tl.load(second + d, mask=known, other=0.0)
        value = tl.load(first + n, mask=here, other=0.0)[:, None] * feature[None, :]
    elif GAIN == 2:
        value = tl.load(first + d, mask=known, other=0.0)[None, :] + tl.zeros((n.shape[0], d.shape[0]), WIDE)
    else:
        value = tl.full((n.shape[0], d.shape[0]), 1.0, WIDE)
    return value


@triton.jit
def out_row(head, r, o, HEAD: tl.constexpr, WIDE: tl.constexpr):
    """Row r of the output map before the gate, for logits o."""
    left, core, line, x1, x2, gate, bias = head
    there = o < HEAD[8] * HEAD[9]
    o1 = o // HEAD[9]
    o2 = o % HEAD[9]
    if HEAD[0] == CP:
        value = tl.load(x1 + o1 * HEAD[4] + r, mask=there, other=0.0)
        if x2 is not None:
            value *= tl.load(x2 + o2 * HEAD[4] + r, mask=there, other=0.0)
    elif HEAD[0] == TUCKER:
        value = tl.load(x1 + o1 * (HEAD[4] // HEAD[10]) + r // HEAD[10], mask=there, other=0.0)
        if x2 is not None:
            value *= tl.load(x2 + o2 * HEAD[10] + r % HEAD[10], mask=there, other=0.0)
    else:
        if x2 is not None:
            value = tl.zeros(o.shape, WIDE)
            for b in range(HEAD[10]):
                left_part = tl.load(x1 + (r * HEAD[8] + o1) * HEAD[10] + b, mask=there, other=0.0)
                value += left_part * tl.load(x2 + b * HEAD[9] + o2, mask=there, other=0.0)
        else:
            value = tl.load(x1 + r * HEAD[8] + o1, mask=there, other=0.0)
    return value


@triton.jit
def fold_row(
    head, gains, in_map, out, biases, r, D,
    HEAD: tl.constexpr, GAIN: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, WIDE: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """One row of in_map; and from the first block of features the row of the output map, and the biases."""
    left, core, line, x1, x2, gate, bias = head
    n = tl.arange(0, NP)
    here = n < N
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    known = d < D
    o = tl.arange(0, HEAD[13] * HEAD[14])
    value = base_of(head, r, n, here, d, known, D, HEAD, WIDE) * gain_of(gains, n, here, d, known, D, GAIN, WIDE)
    first = tl.program_id(0) == 0
    if HEAD[0] == DENSE:
        value *= tl.load(gate)
    else:
        COUNT: tl.constexpr = HEAD[8] * HEAD[9]
        row = out_row(head, r, o, HEAD, WIDE) * tl.load(gate)
        tl.store(out + HEAD[6] + r * COUNT + o, row, mask=(o < COUNT) & first)
    place = ((HEAD[5] + r) * N + n[:, None]) * D + d[None, :]
    tl.store(in_map + place, value, mask=here[:, None] & known[None, :])
    mine = (o < HEAD[8] * HEAD[9]) & first & (r == 0)
    tl.store(biases + HEAD[7] + o, tl.load(bias + o, mask=mine, other=0.0), mask=mine)


@triton.jit
def fold(
    gains, pre, res, post, in_map, out, biases, D,
    GAIN: tl.constexpr, PRE: tl.constexpr, RES: tl.constexpr, POST: tl.constexpr,
    N: tl.constexpr, NP: tl.constexpr, WIDE: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """All folded weights: a row and a block of features for every program."""
    r = tl.program_id(1)
    if r < RES[5]:
        fold_row(pre, gains, in_map, out, biases, r, D, PRE, GAIN, N, NP, WIDE, BD)
    elif r < POST[5]:
        fold_row(res, gains, in_map, out, biases, r - RES[5], D, RES, GAIN, N, NP, WIDE, BD)
    else:
        fold_row(post, gains, in_map, out, biases, r - POST[5], D, POST, GAIN, N, NP, WIDE, BD)


@triton.jit
def load_slope(d_in, r, n, here, d, known, D, HEAD: tl.constexpr, N: tl.constexpr):
    """The gradient of row r of a head's in_map: (NP, BD)."""
    place = ((HEAD[5] + r) * N + n[:, None]) * D + d[None, :]
    return tl.load(d_in + place, mask=here[:, None] & known[None, :], other=0.0)


@triton.jit
def vjp_gain(
    head, d_in, total, n, here, d, known, D, HEAD: tl.constexpr, N: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Adds one head's contribution to the gradient of the gain."""
    left, core, line, x1, x2, gate, bias = head
    for r in range(HEAD[4]):
        part = load_slope(d_in, r, n, here, d, known, D, HEAD, N)
        part *= base_of(head, r, n, here, d, known, D, HEAD, WIDE)
        if HEAD[0] == DENSE:
            part *= tl.load(gate)
        total += part
    return total


@triton.jit
def vjp_weights(
    head, gains, d_in, parts, r, n, here, d, known, D,
    HEAD: tl.constexpr, GAIN: tl.constexpr, N: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A share, over these features, of the gradients of weight[r]; of the gate if there are no weights."""
    slope = load_slope(d_in, r, n, here, d, known, D, HEAD, N) * gain_of(gains, n, here, d, known, D, GAIN, WIDE)
    if HEAD[0] == DENSE:
        value = tl.sum(tl.sum(slope * base_of(head, r, n, here, d, known, D, HEAD, WIDE), 1), 0)
        tl.store(parts + HEAD[11] + r, value)
    else:
        for j in range(HEAD[3]):
            value = tl.sum(slope * line_of(head, r, j, d, known, D, HEAD)[None, :], 1)
            tl.store(parts + HEAD[11] + (r * HEAD[3] + j) * N + n, value, mask=here)


@triton.jit
def vjp_line(
    head, gains, d_in, d_line, k, n, here, d, known, D,
    HEAD: tl.constexpr, GAIN: tl.constexpr, N: tl.constexpr, WIDE: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """The gradient of a line; of row k of W itself if that is what is stored."""
    left, core, line, x1, x2, gate, bias = head
    gain = gain_of(gains, n, here, d, known, D, GAIN, WIDE)
    if HEAD[0] == DENSE:
        slope = load_slope(d_in, k, n, here, d, known, D, HEAD, N) * gain * tl.load(gate)
        place = (n[:, None] * D + d[None, :]) * HEAD[4] + k
        tl.store(d_line + place, slope, mask=here[:, None] & known[None, :])
    elif HEAD[0] == TUCKER:
        total = tl.zeros((BD,), WIDE)
        for r in range(HEAD[4]):
            slope = load_slope(d_in, r, n, here, d, known, D, HEAD, N) * gain
            total += tl.sum(slope * weight_of(head, r, k, n, here, HEAD)[:, None], 0)
        tl.store(d_line + d * HEAD[2] + k, total, mask=known)
    else:
        r = k % HEAD[4]
        j = k // HEAD[4]
        slope = load_slope(d_in, r, n, here, d, known, D, HEAD, N) * gain
        total = tl.sum(slope * weight_of(head, r, j, n, here, HEAD)[:, None], 0)
        tl.store(d_line + (j * D + d) * HEAD[4] + r, total, mask=known)


@triton.jit
def fold_backward(
    gains, pre, res, post, d_gains, d_lines, d_in, parts, D, WIDTH,
    GAIN: tl.constexpr, PRE: tl.constexpr, RES: tl.constexpr, POST: tl.constexpr, LINES: tl.constexpr,
    N: tl.constexpr, NP: tl.constexpr, WIDE: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """The gradients of tensors with features, and partial sums over features for all others.

    The second program index selects the task: the gain, then the weights of every row, then every line.
    """
    R: tl.constexpr = POST[5] + POST[4]
    n = tl.arange(0, NP)
    here = n < N
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    known = d < D
    parts += tl.program_id(0).to(tl.int64) * WIDTH
    d_pre, d_res, d_post = d_lines
    task = tl.program_id(1)
    if task == 0:
        total = tl.zeros((NP, BD), WIDE)
        total = vjp_gain(pre, d_in, total, n, here, d, known, D, PRE, N, WIDE)
        total = vjp_gain(res, d_in, total, n, here, d, known, D, RES, N, WIDE)
        total = vjp_gain(post, d_in, total, n, here, d, known, D, POST, N, WIDE)
        first, second = gains
        d_first, d_second = d_gains
        if GAIN == 0:
            tl.store(d_first + n[:, None] * D + d[None, :], total, mask=here[:, None] & known[None, :])
        elif GAIN == 1:
            streams = tl.load(first + n, mask=here, other=0.0)
            features = tl.load(second + d, mask=known, other=0.0)
            tl.store(d_second + d, tl.sum(total * streams[:, None], 0), mask=known)
            tl.store(parts + n, tl.sum(total * features[None, :], 1), mask=here)
        elif GAIN == 2:
            tl.store(d_first + d, tl.sum(total, 0), mask=known)
    elif task <= R:
        r = task - 1
        if r < RES[5]:
            vjp_weights(pre, gains, d_in, parts, r, n, here, d, known, D, PRE, GAIN, N, WIDE)
        elif r < POST[5]:
            vjp_weights(res, gains, d_in, parts, r - RES[5], n, here, d, known, D, RES, GAIN, N, WIDE)
        else:
            vjp_weights(post, gains, d_in, parts, r - POST[5], n, here, d, known, D, POST, GAIN, N, WIDE)
    else:
        k = task - 1 - R
        if k < LINES[0]:
            vjp_line(pre, gains, d_in, d_pre, k, n, here, d, known, D, PRE, GAIN, N, WIDE, BD)
        elif k < LINES[0] + LINES[1]:
            vjp_line(res, gains, d_in, d_res, k - LINES[0], n, here, d, known, D, RES, GAIN, N, WIDE, BD)
        else:
            k -= LINES[0] + LINES[1]
            vjp_line(post, gains, d_in, d_post, k, n, here, d, known, D, POST, GAIN, N, WIDE, BD)


@triton.jit
def vjp_left(head, sums, d_left, n, here, HEAD: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, WIDE: tl.constexpr):
    """The gradient of the streams' factor from that of the weights."""
    left, core, line, x1, x2, gate, bias = head
    if HEAD[0] == CP:
        for r in range(HEAD[4]):
            value = tl.load(sums + HEAD[11] + r * N + n, mask=here, other=0.0)
            tl.store(d_left + n * HEAD[4] + r, value, mask=here)
    elif HEAD[0] == TT:
        for a in range(HEAD[1]):
            total = tl.zeros((NP,), WIDE)
            for r in range(HEAD[4]):
                total += tl.load(sums + HEAD[11] + (r * HEAD[1] + a) * N + n, mask=here, other=0.0)
            tl.store(d_left + n * HEAD[1] + a, total, mask=here)
    elif HEAD[0] == TUCKER:
        BP: tl.constexpr = HEAD[12]
        b = tl.arange(0, BP)
        fits = (b < HEAD[2])[:, None] & here[None, :]
        for a in range(HEAD[1]):
            total = tl.zeros((BP, NP), WIDE)
            for r in range(HEAD[4]):
                place = HEAD[11] + (r * HEAD[2] + b[:, None]) * N + n[None, :]
                entry = tl.load(core + (a * HEAD[2] + b) * HEAD[4] + r, mask=b < HEAD[2], other=0.0)
                total += entry[:, None] * tl.load(sums + place, mask=fits, other=0.0)
            tl.store(d_left + n * HEAD[1] + a, tl.sum(total, 0), mask=here)


@triton.jit
def vjp_core(head, sums, d_core, n, here, HEAD: tl.constexpr, N: tl.constexpr):
    """The gradient of Tucker's core from that of the weights."""
    left, core, line, x1, x2, gate, bias = head
    if HEAD[0] == TUCKER:
        b = tl.arange(0, HEAD[12])
        fits = (b < HEAD[2])[:, None] & here[None, :]
        for a in range(HEAD[1]):
            factor = tl.load(left + n * HEAD[1] + a, mask=here, other=0.0)
            for r in range(HEAD[4]):
                place = HEAD[11] + (r * HEAD[2] + b[:, None]) * N + n[None, :]
                slope = tl.load(sums + place, mask=fits, other=0.0)
                value = tl.sum(slope * factor[None, :], 1)
                tl.store(d_core + (a * HEAD[2] + b) * HEAD[4] + r, value, mask=b < HEAD[2])


@triton.jit
def vjp_out(head, sums, d_out, slopes, HEAD: tl.constexpr, WIDE: tl.constexpr):
    """The gradients of the factors of the output modes, and of the gate."""
    left, core, line, x1, x2, gate, bias = head
    d_left, d_core, d_line, d_x1, d_x2, d_gate, d_bias = slopes
    O1: tl.constexpr = HEAD[8]
    O2: tl.constexpr = HEAD[9]
    ROWS: tl.constexpr = HEAD[4]
    SECOND: tl.constexpr = HEAD[10]
    P1: tl.constexpr = HEAD[13]
    P2: tl.constexpr = HEAD[14]
    o1 = tl.arange(0, P1)
    o2 = tl.arange(0, P2)
    in1 = o1 < O1
    in2 = o2 < O2
    both = in1[:, None] & in2[None, :]
    place = HEAD[6] + o1[:, None] * O2 + o2[None, :]
    opened = tl.load(gate)
    total = tl.zeros((P1, P2), WIDE)
    if HEAD[0] == DENSE:
        share = tl.zeros((1,), WIDE)
        for r in range(ROWS):
            share += tl.load(sums + HEAD[11] + r)
        tl.store(d_gate + tl.arange(0, 1), share)
    elif HEAD[0] == CP:
        for r in range(ROWS):
            g = tl.load(d_out + place + r * (O1 * O2), mask=both, other=0.0)
            first = tl.load(x1 + o1 * ROWS + r, mask=in1, other=0.0)
            if x2 is not None:
                second = tl.load(x2 + o2 * ROWS + r, mask=in2, other=0.0)
                tl.store(d_x2 + o2 * ROWS + r, opened * tl.sum(g * first[:, None], 0), mask=in2)
                g = g * second[None, :]
            tl.store(d_x1 + o1 * ROWS + r, opened * tl.sum(g, 1), mask=in1)
            total += g * first[:, None]
    elif HEAD[0] == TUCKER:
        Q1: tl.constexpr = ROWS // SECOND
        QP1: tl.constexpr = HEAD[15]
        QP2: tl.constexpr = HEAD[16]
        q1 = tl.arange(0, QP1)
        q2 = tl.arange(0, QP2)
        sum1 = tl.zeros((P1, QP1), WIDE)
        sum2 = tl.zeros((P2, QP2), WIDE)
        for r in range(ROWS):
            g = tl.load(d_out + place + r * (O1 * O2), mask=both, other=0.0)
            first = tl.load(x1 + o1 * Q1 + r // SECOND, mask=in1, other=0.0)
            if x2 is not None:
                second = tl.load(x2 + o2 * SECOND + r % SECOND, mask=in2, other=0.0)
                slope2 = tl.sum(g * first[:, None], 0)
                sum2 += tl.where(q2[None, :] == r % SECOND, slope2[:, None], 0.0)
                g = g * second[None, :]
            sum1 += tl.where(q1[None, :] == r // SECOND, tl.sum(g, 1)[:, None], 0.0)
            total += g * first[:, None]
        spot = o1[:, None] * Q1 + q1[None, :]
        tl.store(d_x1 + spot, opened * sum1, mask=in1[:, None] & (q1 < Q1)[None, :])
        if x2 is not None:
            spot = o2[:, None] * SECOND + q2[None, :]
            tl.store(d_x2 + spot, opened * sum2, mask=in2[:, None] & (q2 < SECOND)[None, :])
    else:
        if x2 is not None:
            for b in range(SECOND):
                second = tl.load(x2 + b * O2 + o2, mask=in2, other=0.0)
                sum2 = tl.zeros((P2,), WIDE)
                for r in range(ROWS):
                    g = tl.load(d_out + place + r * (O1 * O2), mask=both, other=0.0)
                    first = tl.load(x1 + (r * O1 + o1) * SECOND + b, mask=in1, other=0.0)
                    sum2 += tl.sum(g * first[:, None], 0)
                    g = g * second[None, :]
                    tl.store(d_x1 + (r * O1 + o1) * SECOND + b, opened * tl.sum(g, 1), mask=in1)
                    total += g * first[:, None]
                tl.store(d_x2 + b * O2 + o2, opened * sum2, mask=in2)
        else:
            for r in range(ROWS):
                g = tl.load(d_out + place + r * (O1 * O2), mask=both, other=0.0)
                first = tl.load(x1 + r * O1 + o1, mask=in1, other=0.0)
                tl.store(d_x1 + r * O1 + o1, opened * tl.sum(g, 1), mask=in1)
                total += g * first[:, None]
    if HEAD[0] != DENSE:
        tl.store(d_gate + tl.arange(0, 1), tl.sum(tl.sum(total, 1), 0) + tl.zeros((1,), WIDE))


@triton.jit
def vjp_bias(slopes, d_biases, HEAD: tl.constexpr):
    """A head's share of the gradient of all biases."""
    d_left, d_core, d_line, d_x1, d_x2, d_gate, d_bias = slopes
    o = tl.arange(0, HEAD[13] * HEAD[14])
    mine = o < HEAD[8] * HEAD[9]
    tl.store(d_bias + o, tl.load(d_biases + HEAD[7] + o, mask=mine, other=0.0), mask=mine)


@triton.jit
def vjp_small(
    head, slopes, sums, d_out, d_biases, task, n, here,
    HEAD: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One of the four remaining parts of a head's gradients."""
    d_left, d_core, d_line, d_x1, d_x2, d_gate, d_bias = slopes
    if task == 0:
        vjp_left(head, sums, d_left, n, here, HEAD, N, NP, WIDE)
    elif task == 1:
        vjp_core(head, sums, d_core, n, here, HEAD, N)
    elif task == 2:
        vjp_out(head, sums, d_out, slopes, HEAD, WIDE)
    else:
        vjp_bias(slopes, d_biases, HEAD)


@triton.jit
def fold_small_backward(
    pre, res, post, d_gains, d_pre, d_res, d_post, sums, d_out, d_biases,
    GAIN: tl.constexpr, PRE: tl.constexpr, RES: tl.constexpr, POST: tl.constexpr,
    N: tl.constexpr, NP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The gradients of everything without features, from sums over them: a program for every part of every head."""
    n = tl.arange(0, NP)
    here = n < N
    task = tl.program_id(1)
    if tl.program_id(0) == 0:
        vjp_small(pre, d_pre, sums, d_out, d_biases, task, n, here, PRE, N, NP, WIDE)
        if GAIN == 1:
            d_first, d_second = d_gains
            mine = here & (task == 3)
            tl.store(d_first + n, tl.load(sums + n, mask=mine, other=0.0), mask=mine)
    elif tl.program_id(0) == 1:
        vjp_small(res, d_res, sums, d_out, d_biases, task, n, here, RES, N, NP, WIDE)
    else:
        vjp_small(post, d_post, sums, d_out, d_biases, task, n, here, POST, N, NP, WIDE)
