"""From logits to res and back, for a block of tokens: one pair of functions for every kind of mixer.

    solve(x, table, N, NP, SETTINGS) -> res (BT, NP, NP)
    vjp(x, res, grad, table, N, NP, SETTINGS) -> the gradient of the logits (BT, LP)

`x` holds the logits (BT, LP). NP is the next power of two from N; a matrix of logits is padded to NP x NP, and the
streams that are not there form an identity block, which every mixer leaves alone. LP is the number of logits, padded to
a power of two. SETTINGS is (iters, axis normalised last, tol, eps, permutation factors), where every factor has
four numbers: its size, its number of permutations, where its logits start, and the product of the sizes before it.
"""

import triton
import triton.language as tl

TINY = tl.constexpr(1e-30)
# Entries in a row of the table of permutations.
WIDTH = tl.constexpr(8)


@triton.jit
def log_sum(x, AXIS: tl.constexpr):
    top = tl.max(x, AXIS, keep_dims=True)
    return top + tl.log(tl.sum(tl.exp(x - top), AXIS, keep_dims=True))


@triton.jit
def as_matrix(x, N: tl.constexpr, NP: tl.constexpr):
    """(BT, NP * NP) -> (BT, NP, NP), with an identity block for the padding."""
    x = tl.reshape(x, (x.shape[0], NP, NP))
    if N < NP:
        m = tl.arange(0, NP)[None, :, None]
        n = tl.arange(0, NP)[None, None, :]
        x = tl.where((m < N) & (n < N), x, tl.where(m == n, 0.0, float("-inf")))
    return x


@triton.jit
def solve_copy(x, table, N: tl.constexpr, NP: tl.constexpr, SETTINGS: tl.constexpr):
    return tl.reshape(x, (x.shape[0], NP, NP))


@triton.jit
def vjp_copy(x, res, grad, table, N: tl.constexpr, NP: tl.constexpr, SETTINGS: tl.constexpr):
    return tl.reshape(grad, (grad.shape[0], NP * NP))


@triton.jit
def solve_identity(x, table, N: tl.constexpr, NP: tl.constexpr, SETTINGS: tl.constexpr):
    eye = tl.arange(0, NP)[None, :, None] == tl.arange(0, NP)[None, None, :]
    return tl.broadcast_to(tl.where(eye, 1.0, 0.0), (x.shape[0], NP, NP)).to(x.dtype)


@triton.jit
def vjp_identity(x, res, grad, table, N: tl.constexpr, NP: tl.constexpr, SETTINGS: tl.constexpr):
    return tl.zeros_like(x)


@triton.jit
def first_round(x, N: tl.constexpr, NP: tl.constexpr, SETTINGS: tl.constexpr):
    """After the first normalisation (without and with eps), and after the second.

    By logarithms, so that no logit is too large; from then on every sum is in [1 / N^2, N], and dividing is safe.
    """
    LAST: tl.constexpr = SETTINGS[1]
    EPS: tl.constexpr = SETTINGS[3]
    FIRST: tl.constexpr = 3 - LAST
    x = as_matrix(x, N, NP)
    x = x - log_sum(x, FIRST)
    start = tl.exp(x)
    if EPS > 0:
        m = tl.arange(0, NP)[None, :, None]
        n = tl.arange(0, NP)[None, None, :]
        raised = tl.where((m < N) & (n < N), start + EPS, start)
        once = raised * (1.0 / (tl.sum(raised, LAST, keep_dims=True) + EPS))
    else:
        raised = start
        once = tl.exp(x - log_sum(x, LAST))
    return start, raised, once


@triton.jit
def one_round(p, is_open, SETTINGS: tl.constexpr):
    """One round, which tokens it changed, and what was divided by. A token within tol stays as it is."""
    LAST: tl.constexpr = SETTINGS[1]
    TOL: tl.constexpr = SETTINGS[2]
    EPS: tl.constexpr = SETTINGS[3]
    FIRST: tl.constexpr = 3 - LAST
    a = tl.sum(p, FIRST, keep_dims=True) + EPS
    if TOL > 0:
        error = tl.max(tl.abs(a - 1.0), LAST, keep_dims=True)
        is_open = tl.where(error > TOL, is_open, 0.0)
        a = tl.where(is_open > 0, a, 1.0)
    p = p * (1.0 / a)
    b = tl.sum(p, LAST, keep_dims=True) + EPS
    if TOL > 0:
        b = tl.where(is_open > 0, b, 1.0)
    return p * (1.0 / b), is_open, a, b


@triton.jit
def all_open(p):
    """One for every token: (BT, 1, 1)."""
    return tl.full((p.shape[0], 1, 1), 1.0, p.dtype)


@triton.jit
def solve_sinkhorn(x, table, N: tl.constexpr, NP: tl.constexpr, SETTINGS: tl.constexpr):
    """Sinkhorn's rounds, guarded if EPS > 0."""
    _, _, p = first_round(x, N, NP, SETTINGS)
    is_open = all_open(p)
    for _ in range(SETTINGS[0] - 1):
        p, is_open, _a, _b = one_round(p, is_open, SETTINGS)
    return p


@triton.jit
def vjp_rounds(p, carry, grad, skipped, COUNT: tl.constexpr, is_last, SETTINGS: tl.constexpr):
    """Back through COUNT rounds after the first `skipped`: they run again, and then in reverse.

    `carry` is P times the gradient of P. A normalisation takes P times the sum of the carry from it, and P before it
    is P after it times what was divided by.
    """
    LAST: tl.constexpr = SETTINGS[1]
    TOL: tl.constexpr = SETTINGS[2]
    FIRST: tl.constexpr = 3 - LAST
    is_open = all_open(p)
    for _ in range(skipped):
        p, is_open, _a, _b = one_round(p, is_open, SETTINGS)
    by = ()
    for _ in tl.static_range(COUNT):
        p, is_open, a, b = one_round(p, is_open, SETTINGS)
        by = by + (is_open, a, b)
    carry = tl.where(is_last, p * grad, carry)
    for k in tl.static_range(COUNT):
        taken = tl.sum(carry, LAST, keep_dims=True)
        if TOL > 0:
            taken = taken * by[3 * (COUNT - 1 - k)]
        carry -= p * taken
        p = p * by[3 * (COUNT - 1 - k) + 2]
        taken = tl.sum(carry, FIRST, keep_dims=True)
        if TOL > 0:
            taken = taken * by[3 * (COUNT - 1 - k)]
        carry -= p * taken
        p = p * by[3 * (COUNT - 1 - k) + 1]
    return carry


@triton.jit
def vjp_sinkhorn(x, res, grad, table, N: tl.constexpr, NP: tl.constexpr, SETTINGS: tl.constexpr):
    """Recomputes every group of rounds from the start, so memory does not grow with the number of rounds."""
    LAST: tl.constexpr = SETTINGS[1]
    FIRST: tl.constexpr = 3 - LAST
    ROUNDS: tl.constexpr = SETTINGS[0] - 1
    # The number of rounds recomputed at a time, with their sums in registers.
    GROUP: tl.constexpr = 5
    # The first round is by itself; then come the rounds that do not fill a group.
    REST: tl.constexpr = ROUNDS % GROUP
    GROUPS: tl.constexpr = ROUNDS // GROUP
    start, raised, once = first_round(x, N, NP, SETTINGS)
    carry = once * grad
    for i in range(GROUPS):
        carry = vjp_rounds(once, carry, grad, REST + (GROUPS - 1 - i) * GROUP, GROUP, i == 0, SETTINGS)
    if REST > 0:
        carry = vjp_rounds(once, carry, grad, 0, REST, GROUPS == 0, SETTINGS)
    carry -= once * tl.sum(carry, LAST, keep_dims=True)
    if SETTINGS[3] > 0:
        carry = tl.where(raised > 0, carry * start / tl.where(raised > 0, raised, 1.0), 0.0)
    carry -= start * tl.sum(carry, FIRST, keep_dims=True)
    return tl.reshape(carry, (carry.shape[0], NP * NP))


@triton.jit
def turn(matrix, LAST: tl.constexpr):
    """Transposes so that the exact axis becomes the rows, and back."""
    if LAST == 1:
        matrix = tl.permute(matrix, (0, 2, 1))
    return matrix


@triton.jit
def look(x, shift):
    """P at the shift, and the dual objective there."""
    shifted = x + shift[:, None, :]
    rows = log_sum(shifted, 2)
    return tl.exp(shifted - rows), tl.sum(tl.sum(rows, 2), 1) - tl.sum(shift, 1)


@triton.jit
def row_of(matrix, k, NP: tl.constexpr):
    """Row k of every matrix: (BT, NP)."""
    return tl.sum(tl.where(tl.arange(0, NP)[None, :, None] == k, matrix, 0.0), 1)


@triton.jit
def gram(p, NP: tl.constexpr):
    """P^T P, row by row: the compiler turns a sum of products over a broadcast axis into a product in TF32."""
    total = tl.zeros_like(p)
    for m in range(NP):
        row = row_of(p, m, NP)
        total += row[:, :, None] * row[:, None, :]
    return total


@triton.jit
def solve_laplacian(weights, slope, NP: tl.constexpr):
    """As in `temper.mixers.sinkhorn.newton`; the row that eliminated a node stays where it was."""
    j = tl.arange(0, NP)[None, :]
    for i in range(NP - 1):
        k = NP - 1 - i
        line = tl.where(j < k, row_of(weights, k, NP), 0.0)
        share = line / tl.maximum(tl.sum(line, 1, keep_dims=True), TINY)
        slope += share * tl.sum(tl.where(j == k, slope, 0.0), 1, keep_dims=True)
        weights += share[:, :, None] * line[:, None, :]
    x = tl.zeros_like(slope)
    for k in range(1, NP):
        line = tl.where(j < k, row_of(weights, k, NP), 0.0)
        pivot = tl.maximum(tl.sum(line, 1, keep_dims=True), TINY)
        last = tl.sum(tl.where(j == k, slope, 0.0) + line * x, 1, keep_dims=True)
        x = tl.where(j == k, last / pivot, x)
    return x


@triton.jit
def solve_newton(x, table, N: tl.constexpr, NP: tl.constexpr, SETTINGS: tl.constexpr):
    LAST: tl.constexpr = SETTINGS[1]
    TOL: tl.constexpr = SETTINGS[2]
    # Plain rounds before the first step of Newton's method, and its longest step.
    WARM_UP: tl.constexpr = 4
    LONGEST: tl.constexpr = 4.0
    # A few units in the last place.
    ROUNDING: tl.constexpr = 4 * 2.220446049250313e-16 if x.dtype == tl.float64 else 4 * 1.1920928955078125e-07
    x = turn(as_matrix(x, N, NP), LAST)
    largest = tl.max(tl.max(tl.where(x == float("-inf"), 0.0, tl.abs(x)), 2), 1)
    shift = -tl.sum(log_sum(x, 1), 1)
    for _ in range(WARM_UP):
        p, _height = look(x, shift)
        shift -= tl.log(tl.maximum(tl.sum(p, 1), TINY))
    p, height = look(x, shift)
    sums = tl.sum(p, 1)
    error = tl.max(tl.abs(sums - 1.0), 1)
    i = 0
    # Converged tokens are frozen, so a token's result does not depend on how long others take.
    while (i < SETTINGS[0]) & (tl.max(error, 0) > TOL):
        step = solve_laplacian(gram(p, NP), 1.0 - sums, NP)
        if N < NP:
            step = tl.where(tl.arange(0, NP)[None, :] < N, step - tl.sum(step, 1, keep_dims=True) / N, 0.0)
        else:
            step = step - tl.sum(step, 1, keep_dims=True) / N
        longest = tl.max(tl.abs(step), 1, keep_dims=True)
        step = step * tl.minimum(LONGEST / tl.maximum(longest, TINY), 1.0)
        trial, lower = look(x, shift + step)
        # Accept Newton's step if it lowers the objective or, within rounding of it, the error.
        room = ROUNDING * (tl.sum(tl.abs(shift), 1) + largest)
        nearer = tl.max(tl.abs(tl.sum(trial, 1) - 1.0), 1) < error
        better = (lower < height) | (nearer & (lower < height + room))
        plain = shift - tl.log(tl.maximum(sums, TINY))
        moved = tl.where(better[:, None], shift + step, plain)
        shift = tl.where((error <= TOL)[:, None], shift, moved)
        p, height = look(x, shift)
        sums = tl.sum(p, 1)
        error = tl.max(tl.abs(sums - 1.0), 1)
        i += 1
    return turn(p, LAST)


@triton.jit
def vjp_newton(x, res, grad, table, N: tl.constexpr, NP: tl.constexpr, SETTINGS: tl.constexpr):
    """The gradient of the limit, by the implicit function theorem."""
    LAST: tl.constexpr = SETTINGS[1]
    p = turn(res, LAST)
    grad = turn(grad, LAST)
    part = p * grad
    left = tl.sum(part, 2, keep_dims=True)
    step = solve_laplacian(gram(p, NP), tl.sum(p * left, 1) - tl.sum(part, 1), NP)
    level = left + tl.sum(p * step[:, None, :], 2, keep_dims=True)
    gradient = turn(p * (grad - level + step[:, None, :]), LAST)
    return tl.reshape(gradient, (gradient.shape[0], NP * NP))


@triton.jit
def mixture_weights(x, FROM: tl.constexpr, COUNT: tl.constexpr):
    """softmax over the logits of one factor; zero elsewhere."""
    at = tl.arange(0, x.shape[1])[None, :]
    x = tl.where((at >= FROM) & (at < FROM + COUNT), x, float("-inf"))
    x = tl.exp(x - tl.max(x, 1, keep_dims=True))
    return x / tl.sum(x, 1, keep_dims=True)


@triton.jit
def targets(table, i, FROM: tl.constexpr, COUNT: tl.constexpr, LP: tl.constexpr):
    """The image of i under each permutation of a factor; -1 for the logits of other factors."""
    at = tl.arange(0, LP)
    mine = (at >= FROM) & (at < FROM + COUNT)
    return tl.load(table + at * WIDTH + i, mask=mine, other=-1)[None, :]


@triton.jit
def is_entry(i, j, SIZE: tl.constexpr, INNER: tl.constexpr, NP: tl.constexpr):
    """Which entries of res have the factor's entry (i, j) in them."""
    m = tl.arange(0, NP)[None, :, None]
    n = tl.arange(0, NP)[None, None, :]
    return ((m // INNER) % SIZE == i) & ((n // INNER) % SIZE == j)


@triton.jit
def spread_mixture(
    x, table, SIZE: tl.constexpr, COUNT: tl.constexpr, FROM: tl.constexpr, INNER: tl.constexpr, NP: tl.constexpr
):
    """The matrix of one factor, every entry wherever it is a factor of res: (BT, NP, NP)."""
    weights = mixture_weights(x, FROM, COUNT)
    spread = tl.zeros((x.shape[0], NP, NP), x.dtype)
    for i in range(SIZE):
        to = targets(table, i, FROM, COUNT, x.shape[1])
        for j in range(SIZE):
            entry = tl.sum(tl.where(to == j, weights, 0.0), 1)
            spread += tl.where(is_entry(i, j, SIZE, INNER, NP), entry[:, None, None], 0.0)
    return spread


@triton.jit
def solve_permutations(x, table, N: tl.constexpr, NP: tl.constexpr, SETTINGS: tl.constexpr):
    FACTORS: tl.constexpr = SETTINGS[4]
    res = spread_mixture(x, table, FACTORS[0], FACTORS[1], FACTORS[2], FACTORS[3], NP)
    for k in tl.static_range(4, len(FACTORS), 4):
        res = res * spread_mixture(x, table, FACTORS[k], FACTORS[k + 1], FACTORS[k + 2], FACTORS[k + 3], NP)
    return res


@triton.jit
def vjp_permutations(x, res, grad, table, N: tl.constexpr, NP: tl.constexpr, SETTINGS: tl.constexpr):
    FACTORS: tl.constexpr = SETTINGS[4]
    spreads = ()
    for k in tl.static_range(0, len(FACTORS), 4):
        spreads = spreads + (spread_mixture(x, table, FACTORS[k], FACTORS[k + 1], FACTORS[k + 2], FACTORS[k + 3], NP),)
    gradient = tl.zeros_like(x)
    for k in tl.static_range(0, len(FACTORS), 4):
        slope = grad
        for other in tl.static_range(0, len(FACTORS), 4):
            if other != k:
                slope = slope * spreads[other // 4]
        weights = mixture_weights(x, FACTORS[k + 2], FACTORS[k + 1])
        up = tl.zeros_like(x)
        for i in range(FACTORS[k]):
            to = targets(table, i, FACTORS[k + 2], FACTORS[k + 1], x.shape[1])
            for j in range(FACTORS[k]):
                entry = tl.sum(tl.sum(tl.where(is_entry(i, j, FACTORS[k], FACTORS[k + 3], NP), slope, 0.0), 2), 1)
                up += tl.where(to == j, entry[:, None], 0.0)
        gradient += weights * (up - tl.sum(weights * up, 1, keep_dims=True))
    return gradient


# By the kinds of mixers, as `temper.ops.plan.MixerSpec` names them.
MIXERS = {
    "copy": (solve_copy, vjp_copy),
    "identity": (solve_identity, vjp_identity),
    "sinkhorn": (solve_sinkhorn, vjp_sinkhorn),
    "guarded": (solve_sinkhorn, vjp_sinkhorn),
    "newton": (solve_newton, vjp_newton),
    "permutations": (solve_permutations, vjp_permutations),
}
