// One text as a model read it: routing token by token, and what follows from it. Token ALL is the mean over tokens.
const ALL = -1;

class Reading {
  // packed: for every site pre (T, N), res (T, M, N), post (T, M), similarity (T).
  constructor({ pieces, surprise, isCut, packed }, streams, sites) {
    Object.assign(this, { pieces, surprise, isCut, packed, streams, sites, count: pieces.length });
    this.composites = [];
    for (let site = 0; site < sites; site++) {
      const before = this.composites[site - 1];
      this.composites.push(
        Array.from({ length: this.count }, (_, t) => {
          const res = this.at(site, "res", t);
          return before ? matrixProduct(res, before[t], streams) : Float64Array.from(res);
        }),
      );
    }
  }

  at(site, part, t) {
    const { streams: n, count } = this;
    const [size, before] = { pre: [n, 0], res: [n * n, n], post: [n, n + n * n], similarity: [1, 2 * n + n * n] }[part];
    const start = count * (site * (n * n + 2 * n + 1) + before) + t * size;
    return this.packed.subarray(start, start + size);
  }

  // pre, res, post, similarity or composite of one token, or of all.
  values(site, part, token) {
    const of = (t) => (part === "composite" ? this.composites[site][t] : this.at(site, part, t));
    if (token !== ALL) return of(token);
    const mean = new Float64Array(of(0).length);
    for (let t = 0; t < this.count; t++) of(t).forEach((value, k) => (mean[k] += value / this.count));
    return mean;
  }

  // Gains and similarity (means over tokens) and errors (the largest).
  numbers(site, token) {
    const { streams: n } = this;
    const tokens = token === ALL ? Array.from({ length: this.count }, (_, t) => t) : [token];
    const mean = (of) => tokens.reduce((sum, t) => sum + of(t), 0) / tokens.length;
    const most = (of) => tokens.reduce((high, t) => Math.max(high, of(t)), 0);
    const res = (t) => this.at(site, "res", t);
    const composite = (t) => this.composites[site][t];
    return {
      forward: mean((t) => largest(lineSums(res(t), n, 1, Math.abs))),
      backward: mean((t) => largest(lineSums(res(t), n, 0, Math.abs))),
      compositeForward: mean((t) => largest(lineSums(composite(t), n, 1, Math.abs))),
      compositeBackward: mean((t) => largest(lineSums(composite(t), n, 0, Math.abs))),
      rowError: most((t) => largest(lineSums(res(t), n, 1, (v) => v).map((sum) => Math.abs(sum - 1)))),
      columnError: most((t) => largest(lineSums(res(t), n, 0, (v) => v).map((sum) => Math.abs(sum - 1)))),
      similarity: mean((t) => this.at(site, "similarity", t)[0]),
    };
  }
}

const largest = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);

// Sums of rows (axis 1) or columns (axis 0).
function lineSums(matrix, n, axis, of) {
  const sums = new Float64Array(n);
  for (let m = 0; m < n; m++) for (let k = 0; k < n; k++) sums[axis ? m : k] += of(matrix[m * n + k]);
  return sums;
}

function matrixProduct(a, b, n) {
  const product = new Float64Array(n * n);
  for (let m = 0; m < n; m++)
    for (let j = 0; j < n; j++)
      for (let k = 0; k < n; k++) product[m * n + k] += a[m * n + j] * b[j * n + k];
  return product;
}

// Base64 to bytes.
function bytesOf(text) {
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let k = 0; k < raw.length; k++) bytes[k] = raw.charCodeAt(k);
  return bytes.buffer;
}
