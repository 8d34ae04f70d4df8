// The model itself, in float64 on float32 weights; runs in a worker so that the page stays awake.
const EPS = 1e-6;
const CAP = 15;
const sigmoid = (z) => 1 / (1 + Math.exp(-z));
const same = (z) => z;
// What acts between the maps and the gates, and what makes weights of the logits.
const GATES = {
  sigmoid: { squash: same, pre: sigmoid, post: (z) => 2 * sigmoid(z) },
  tanh: { squash: Math.tanh, pre: same, post: same },
};

class Model {
  // weights: the bytes of all tensors, in the order of the table.
  constructor(description, table, weights) {
    Object.assign(this, description);
    this.headDim = this.width / this.heads;
    this.tensors = {};
    let start = 0;
    const take = (kind, size) => {
      const view = new kind(weights, start, size);
      start += Math.ceil(view.byteLength / 4) * 4;
      return view;
    };
    for (const { name, size, rows } of table) {
      this.tensors[name] = rows ? lengthen(take(Int16Array, size), take(Float32Array, rows)) : take(Float32Array, size);
    }
  }

  // Everything the page shows of these ids: routing as trace.py packs it, and the bits of every token.
  run(ids, progress) {
    const { width, streams: n, layers, routing } = this;
    const count = ids.length;
    const perSite = count * (n * n + 2 * n + 1);
    const packed = new Float64Array(2 * layers * perSite);
    let streams = new Float64Array(count * n * width);
    ids.forEach((id, t) => {
      const row = normed(this.tensors.embedding.subarray(id * width, (id + 1) * width));
      for (let s = 0; s < n; s++) streams.set(row, (t * n + s) * width);
    });
    for (let site = 0; site < 2 * layers; site++) {
      progress(site / (2 * layers));
      const out = packed.subarray(site * perSite, (site + 1) * perSite);
      const pre = out.subarray(0, count * n);
      const res = out.subarray(count * n, count * n * (1 + n));
      const post = out.subarray(count * n * (1 + n), count * n * (2 + n));
      const x = new Float64Array(count * width);
      for (let t = 0; t < count; t++) {
        const token = streams.subarray(t * n * width, (t + 1) * n * width);
        out[count * n * (2 + n) + t] = similarity(token, n, width);
        const decided = routing ? this.route(site, token) : { pre: [1], res: [1], post: [1] };
        pre.set(decided.pre, t * n);
        res.set(decided.res, t * n * n);
        post.set(decided.post, t * n);
        for (let s = 0; s < n; s++)
          for (let d = 0; d < width; d++) x[t * width + d] += decided.pre[s] * token[s * width + d];
      }
      for (let t = 0; t < count; t++) x.set(normed(x.subarray(t * width, (t + 1) * width)), t * width);
      const y = site % 2 ? this.mlp(site >> 1, x) : this.attention(site >> 1, x, count);
      streams = this.write(streams, y, res, post, count);
    }
    return { packed, surprise: this.surprise(ids, streams) };
  }

  // pre, res and post of one token: norm, two maps, gates and mixer.
  route(site, token) {
    const { rows, logits, direct, gates, norm, eps, clamp, preEps, mixer } = this.routing;
    const { streams: n, width } = this;
    const inMap = this.tensors[`site${site}.in`];
    const outMap = this.tensors[`site${site}.out`];
    const gate = this.tensors[`site${site}.gate`];
    const bias = this.tensors[`site${site}.bias`];
    const scaled = new Float64Array(token.length);
    const span = norm === "flat" ? n * width : width;
    for (let start = 0; start < n * width; start += span) {
      let sum = 0;
      for (let k = start; k < start + span; k++) sum += token[k] * token[k];
      const mean = sum / span;
      const rstd = 1 / Math.sqrt(clamp ? Math.max(mean, eps) : mean + eps);
      for (let k = start; k < start + span; k++) scaled[k] = token[k] * rstd;
    }
    const { squash, pre, post } = GATES[gates];
    const heads = [];
    let [row, place, first] = [0, 0, 0];
    for (let head = 0; head < 3; head++) {
      const values = new Float64Array(logits[head]);
      for (let r = 0; r < rows[head]; r++) {
        const bottleneck = dot(inMap, (row + r) * n * width, scaled, 0, n * width);
        if (direct[head]) values[r] = bottleneck;
        else for (let o = 0; o < values.length; o++) values[o] += bottleneck * outMap[place + r * values.length + o];
      }
      for (let o = 0; o < values.length; o++) values[o] = gate[head] * squash(values[o]) + bias[first + o];
      row += rows[head];
      if (!direct[head]) place += rows[head] * values.length;
      first += values.length;
      heads.push(values);
    }
    return {
      pre: heads[0].map((z) => pre(z) + preEps),
      res: MIXERS[mixer.name](heads[1], n, mixer),
      post: heads[2].map(post),
    };
  }

  write(streams, y, res, post, count) {
    const { streams: n, width } = this;
    const next = new Float64Array(streams.length);
    for (let t = 0; t < count; t++)
      for (let m = 0; m < n; m++) {
        const to = (t * n + m) * width;
        const written = post[t * n + m];
        for (let d = 0; d < width; d++) next[to + d] = written * y[t * width + d];
        for (let s = 0; s < n; s++) {
          const weight = res[(t * n + m) * n + s];
          const from = (t * n + s) * width;
          for (let d = 0; d < width; d++) next[to + d] += weight * streams[from + d];
        }
      }
    return next;
  }

  attention(layer, x, count) {
    const { width, heads, headDim } = this;
    const linear = (name) => product(x, this.tensors[`${layer}.${name}`], width, width);
    const [query, key, value] = ["query", "key", "value"].map(linear);
    this.rotateAndNorm(query, count);
    this.rotateAndNorm(key, count);
    const mixed = new Float64Array(count * width);
    const scale = 1 / Math.sqrt(headDim);
    for (let head = 0; head < heads; head++)
      for (let t = 0; t < count; t++) {
        const at = t * width + head * headDim;
        const weights = new Float64Array(t + 1);
        for (let s = 0; s <= t; s++) weights[s] = scale * dot(key, s * width + head * headDim, query, at, headDim);
        const most = weights.reduce((a, b) => Math.max(a, b), -Infinity);
        let sum = 0;
        for (let s = 0; s <= t; s++) sum += weights[s] = Math.exp(weights[s] - most);
        for (let s = 0; s <= t; s++)
          for (let d = 0; d < headDim; d++)
            mixed[at + d] += (weights[s] / sum) * value[s * width + head * headDim + d];
      }
    return product(mixed, this.tensors[`${layer}.out`], width, width);
  }

  rotateAndNorm(x, count) {
    const { width, heads, headDim } = this;
    const { cos, sin } = this.tensors;
    const half = headDim / 2;
    for (let t = 0; t < count; t++)
      for (let head = 0; head < heads; head++) {
        const start = t * width + head * headDim;
        for (let k = 0; k < half; k++) {
          const [c, s] = [cos[t * half + k], sin[t * half + k]];
          const [first, second] = [x[start + k], x[start + half + k]];
          x[start + k] = first * c + second * s;
          x[start + half + k] = second * c - first * s;
        }
        x.set(normed(x.subarray(start, start + headDim)), start);
      }
  }

  mlp(layer, x) {
    const { width } = this;
    const wide = product(x, this.tensors[`${layer}.up`], width, 4 * width);
    for (let k = 0; k < wide.length; k++) wide[k] = wide[k] > 0 ? wide[k] * wide[k] : 0;
    return product(wide, this.tensors[`${layer}.down`], 4 * width, width);
  }

  // Bits of every token given those before it; null for the first.
  surprise(ids, streams) {
    const { width, streams: n } = this;
    const features = new Float64Array((ids.length - 1) * width);
    for (let t = 0; t + 1 < ids.length; t++) {
      const sum = new Float64Array(width);
      for (let s = 0; s < n; s++) for (let d = 0; d < width; d++) sum[d] += streams[(t * n + s) * width + d];
      features.set(normed(sum), t * width);
    }
    const vocabulary = this.tensors.head.length / width;
    const logits = product(features, this.tensors.head, width, vocabulary);
    const bits = [null];
    for (let t = 0; t + 1 < ids.length; t++) {
      // Capped logits are small: their exponentials need no shift.
      const capped = logits.subarray(t * vocabulary, (t + 1) * vocabulary).map((z) => CAP * Math.tanh(z / CAP));
      const total = capped.reduce((sum, z) => sum + Math.exp(z), 0);
      bits.push((Math.log(total) - capped[ids[t + 1]]) / Math.LN2);
    }
    return bits;
  }
}

// y = x W^T: rows of x against rows of W, one row of W for all of x at a time.
function product(x, weight, inputs, outputs) {
  const count = x.length / inputs;
  const y = new Float64Array(count * outputs);
  for (let o = 0; o < outputs; o++)
    for (let t = 0; t < count; t++) y[t * outputs + o] = dot(weight, o * inputs, x, t * inputs, inputs);
  return y;
}

function dot(a, i, b, j, length) {
  let [sum0, sum1, sum2, sum3] = [0, 0, 0, 0];
  let k = 0;
  for (; k + 3 < length; k += 4) {
    sum0 += a[i + k] * b[j + k];
    sum1 += a[i + k + 1] * b[j + k + 1];
    sum2 += a[i + k + 2] * b[j + k + 2];
    sum3 += a[i + k + 3] * b[j + k + 3];
  }
  for (; k < length; k++) sum0 += a[i + k] * b[j + k];
  return sum0 + sum1 + (sum2 + sum3);
}

function normed(x) {
  const rstd = 1 / Math.sqrt(dot(x, 0, x, 0, x.length) / x.length + EPS);
  return Float64Array.from(x, (value) => value * rstd);
}

// The mean cosine between two different streams.
function similarity(token, n, width) {
  if (n === 1) return 1;
  const norms = Array.from({ length: n }, (_, s) => Math.sqrt(dot(token, s * width, token, s * width, width)));
  let sum = 0;
  for (let a = 0; a < n; a++)
    for (let b = 0; b < a; b++)
      sum += dot(token, a * width, token, b * width, width) / Math.max(norms[a] * norms[b], 1e-24);
  return (2 * sum) / (n * (n - 1));
}

// Whole numbers times the scale of their row.
function lengthen(numbers, scales) {
  const columns = numbers.length / scales.length;
  return Float32Array.from(numbers, (number, k) => number * scales[Math.floor(k / columns)]);
}
