// Logits of one token to its mixing matrix, row by row: out[m * n + k] is what stream m takes from stream k.
const MIXERS = {
  unconstrained: (logits) => Float64Array.from(logits),

  identity: (_, n) => Float64Array.from({ length: n * n }, (_, index) => (index % (n + 1) === 0 ? 1 : 0)),

  birkhoff: (logits, n) => permutationMixture(logits, n),

  // The innermost factor first; sizes are the prime factors of n.
  kronecker(logits, n) {
    let product = Float64Array.of(1);
    let size = 1;
    let start = 0;
    for (const factor of primeFactors(n)) {
      const count = permutations(factor).length;
      product = kroneckerProduct(permutationMixture(logits.subarray(start, start + count), factor), factor, product, size);
      start += count;
      size *= factor;
    }
    return product;
  },

  sinkhorn(logits, n, options) {
    const turn = (matrix) => (options.last === "rows" ? matrix : transpose(matrix, n));
    const turned = turn(logits);
    if (options.method === "newton") return turn(sinkhornLimit(turned, n));
    return turn(options.eps ? guardedRounds(turned, n, options) : plainRounds(turned, n, options));
  },
};

// Columns to sum 1, then rows, in logarithms.
function plainRounds(logits, n, { iters, tol }) {
  const value = Float64Array.from(logits);
  for (let round = 0; round < iters; round++) {
    for (let k = 0; k < n; k++) shiftLine(value, k, n, n);
    for (let m = 0; m < n; m++) shiftLine(value, m * n, 1, n);
    if (tol !== null && columnError(value.map(Math.exp), n) <= tol) break;
  }
  return value.map(Math.exp);
}

// DeepSeek-V4's form: a softmax, then divisions by sums, each with eps added.
function guardedRounds(logits, n, { iters, tol, eps }) {
  const value = Float64Array.from(logits);
  for (let round = 0; round < iters; round++) {
    for (let k = 0; k < n; k++) {
      if (round) divideLine(value, k, n, n, eps);
      else {
        shiftLine(value, k, n, n);
        for (let m = 0; m < n; m++) value[m * n + k] = Math.exp(value[m * n + k]) + eps;
      }
    }
    for (let m = 0; m < n; m++) divideLine(value, m * n, 1, n, eps);
    if (tol !== null && columnError(value, n) <= tol) break;
  }
  return value;
}

// Where the rounds converge to: rows are softmaxes of logits + b, and b makes every column sum to 1. Newton's steps
// on the convex dual where they bring the columns nearer, plain rounds elsewhere (src/temper/mixers/sinkhorn/newton.py).
function sinkhornLimit(logits, n) {
  const look = (b) => {
    const value = logits.map((logit, index) => logit + b[index % n]);
    for (let m = 0; m < n; m++) shiftLine(value, m * n, 1, n);
    return value.map(Math.exp);
  };
  const sums = (value) => Float64Array.from({ length: n }, (_, k) => columnSum(value, k, n));
  let b = new Float64Array(n);
  let value = look(b);
  for (let round = 0; round < 10000; round++) {
    const error = columnError(value, n);
    if (error < 1e-13) break;
    const now = sums(value);
    const step = round < 4 ? null : newtonStep(value, now, n);
    const trial = step && b.map((part, k) => part + step[k]);
    const tried = trial && look(trial);
    if (tried && columnError(tried, n) < error) [b, value] = [trial, tried];
    else {
      b = b.map((part, k) => part - Math.log(now[k]));
      value = look(b);
    }
  }
  return value;
}

// x with x[0] = 0 and sum_k w[j, k] (x[j] - x[k]) = 1 - sums[j], w = P^T P. Elimination without a subtraction keeps
// the digits of weights that are nearly zero.
function newtonStep(value, sums, n) {
  const weight = new Float64Array(n * n);
  for (let j = 0; j < n; j++)
    for (let k = 0; k < n; k++)
      for (let m = 0; m < n; m++) weight[j * n + k] += value[m * n + j] * value[m * n + k];
  const slope = sums.map((sum) => 1 - sum);
  const pivots = new Float64Array(n);
  for (let last = n - 1; last > 0; last--) {
    for (let k = 0; k < last; k++) pivots[last] += weight[last * n + k];
    if (!(pivots[last] > 1e-300)) return null;
    for (let j = 0; j < last; j++) {
      const share = weight[j * n + last] / pivots[last];
      slope[j] += share * slope[last];
      for (let k = 0; k < last; k++) if (k !== j) weight[j * n + k] += share * weight[last * n + k];
    }
  }
  const x = new Float64Array(n);
  for (let j = 1; j < n; j++) {
    x[j] = slope[j];
    for (let k = 0; k < j; k++) x[j] += weight[j * n + k] * x[k];
    x[j] /= pivots[j];
  }
  const mean = x.reduce((sum, part) => sum + part, 0) / n;
  const longest = x.reduce((most, part) => Math.max(most, Math.abs(part - mean)), 1e-300);
  return x.map((part) => (part - mean) * Math.min(1, 4 / longest));
}

function shiftLine(value, start, stride, n) {
  let most = -Infinity;
  for (let k = 0; k < n; k++) most = Math.max(most, value[start + k * stride]);
  let sum = 0;
  for (let k = 0; k < n; k++) sum += Math.exp(value[start + k * stride] - most);
  const level = most + Math.log(sum);
  for (let k = 0; k < n; k++) value[start + k * stride] -= level;
}

function divideLine(value, start, stride, n, eps) {
  let sum = eps;
  for (let k = 0; k < n; k++) sum += value[start + k * stride];
  for (let k = 0; k < n; k++) value[start + k * stride] /= sum;
}

function columnSum(value, column, n) {
  let sum = 0;
  for (let m = 0; m < n; m++) sum += value[m * n + column];
  return sum;
}

function columnError(value, n) {
  let most = 0;
  for (let k = 0; k < n; k++) most = Math.max(most, Math.abs(columnSum(value, k, n) - 1));
  return most;
}

function transpose(value, n) {
  return Float64Array.from(value, (_, index) => value[(index % n) * n + Math.floor(index / n)]);
}

function permutationMixture(logits, n) {
  const most = logits.reduce((a, b) => Math.max(a, b), -Infinity);
  const weights = Float64Array.from(logits, (logit) => Math.exp(logit - most));
  const total = weights.reduce((a, b) => a + b, 0);
  const res = new Float64Array(n * n);
  permutations(n).forEach((order, p) => order.forEach((to, m) => (res[m * n + to] += weights[p] / total)));
  return res;
}

const knownPermutations = new Map();

// In lexicographic order, the identity first.
function permutations(n) {
  if (!knownPermutations.has(n)) {
    const grow = (start, rest) =>
      rest.length ? rest.flatMap((next) => grow([...start, next], rest.filter((other) => other !== next))) : [start];
    knownPermutations.set(n, grow([], Array.from({ length: n }, (_, k) => k)));
  }
  return knownPermutations.get(n);
}

function primeFactors(n) {
  const factors = [];
  for (let prime = 2; n > 1; prime++) for (; n % prime === 0; n /= prime) factors.push(prime);
  return factors;
}

function kroneckerProduct(left, a, right, b) {
  const size = a * b;
  const product = new Float64Array(size * size);
  for (let row = 0; row < size; row++)
    for (let column = 0; column < size; column++)
      product[row * size + column] =
        left[Math.floor(row / b) * a + Math.floor(column / b)] * right[(row % b) * b + (column % b)];
  return product;
}
