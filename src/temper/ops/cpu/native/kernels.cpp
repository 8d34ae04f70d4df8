// The passes over streams, and the routing between them, behind a few functions with a plain C interface.
//
// Letters: N streams, D features, R bottleneck rows, K = N + N^2 + N routing weights of a token (pre, res, post).
// Tokens are worked on in blocks of eight: while a block is in cache its streams are read once for the
// sum of squares, the R dot products and x, and between those passes every lane is a token. `finish` of one site and
// `begin` of the next are chained block by block, so that the streams between them are written and read in cache.
// Blocks and the chunks of a reduction do not depend on the number of threads, so neither do the results.

#include <functional>
#include <memory>
#include <vector>

#include "fold.h"
#include "lanes.h"
#include "mixers.h"
#include "passes.h"
#include "plan.h"

namespace temper {
namespace {

// out[d] = sum_i weights[i] rows[i][d].
template <class S, class T, class R>
inline void combine(const R* weights, const S* rows, Index num_rows, Index dim, T* out) {
    features<R>(0, dim, [&](Index d, auto kind, auto num) {
        using V = decltype(kind);
        V acc[1][num] = {};
        mix(acc, weights, 0, 1, rows, num_rows, dim, d);
        for (int u = 0; u < num; ++u) store(out + d + u * Width<V>::value, acc[0][u]);
    });
}

// Rows of a map, tile of features by tile of features. In rows of their own, neighbours would often lie a
// multiple of 4096 bytes apart and keep throwing each other out of the cache.
struct Tiles {
    static constexpr Index SIZE = 2 * Width<Wide<float>>::value;
    Tiles(Index rows, Index streams, Index dim)
        : rows(rows), streams(streams), dim(dim), across((dim + SIZE - 1) / SIZE) {}

    Index size() const { return streams * across * rows * SIZE; }
    // Where row 0 has feature d of stream n; the next row is SIZE further.
    Index at(Index n, Index d) const { return (n * across + d / SIZE) * rows * SIZE + d % SIZE; }

    // Copies between rows (rows, streams * dim) and tiles, from `begin` to `end` of the streams.
    template <class R, class F>
    void each(R* plain, F&& f) const {
        for (Index n = 0; n < streams; ++n)
            for (Index d = 0; d < dim; d += SIZE)
                for (Index r = 0; r < rows; ++r)
                    f(plain + (r * streams + n) * dim + d, at(n, d) + r * SIZE, std::min(SIZE, dim - d));
    }

    Index rows, streams, dim, across;
};

// Sizes that follow from a plan.
struct Sizes {
    explicit Sizes(const Plan& plan)
        : n(plan.streams), dim(plan.dim), width(n * dim), logits{n, plan.logits, n}, weights(n * n + 2 * n) {
        for (int h = 0; h < 3; ++h) {
            rows += plan.rows[h];
            biases += logits[h];
            maps += plan.direct[h] ? 0 : plan.rows[h] * logits[h];
        }
    }
    Index n, dim, width, logits[3], weights, rows = 0, biases = 0, maps = 0;
};

// The routing of a block, a token in every lane.
template <class R>
struct Routing {
    using V = Pack<R>;
    explicit Routing(const Sizes& sizes)
        : z(sizes.rows),
          bottleneck(sizes.rows),
          logits(sizes.biases),
          weights(sizes.weights),
          d_z(sizes.rows),
          d_logits(sizes.biases),
          d_weights(sizes.weights) {}

    // logits = bias + bottleneck . out, head by head.
    void fill_logits(const Plan& plan, const Sizes& sizes, const R* out, const R* bias) {
        V *logit = logits.data(), *row = bottleneck.data();
        for (int h = 0; h < 3; ++h) {
            Index num = sizes.logits[h];
            for (Index o = 0; o < num; ++o) logit[o] = same<V>(bias[o]);
            if (plan.direct[h])
                for (Index o = 0; o < num; ++o) logit[o] += row[o];
            else
                for (Index r = 0; r < plan.rows[h]; ++r, out += num)
                    for (Index o = 0; o < num; ++o) logit[o] += row[r] * out[o];
            logit += num, bias += num, row += plan.rows[h];
        }
    }

    std::vector<V> z, bottleneck, logits, weights, d_z, d_logits, d_weights;
    V rstd, slope;
};

// Entries of a block's tokens, (count, length), to (length) vectors with a token in every lane; and back.
template <class R>
inline void to_lanes(const R* rows, Index count, Index length, Pack<R>* lanes) {
    Index e = 0;
    if (CAN_TRANSPOSE && count == LANES)
        for (; e + LANES <= length; e += LANES) {
            Pack<R> v[LANES];
            for (int t = 0; t < LANES; ++t) v[t] = load<Pack<R>>(rows + t * length + e);
            transpose(v);
            for (int k = 0; k < LANES; ++k) lanes[e + k] = v[k];
        }
    for (; e < length; ++e) {
        Pack<R> v{};
        for (Index t = 0; t < count; ++t) v[t] = rows[t * length + e];
        lanes[e] = v;
    }
}
template <class R>
inline void from_lanes(const Pack<R>* lanes, Index count, Index length, R* rows) {
    Index e = 0;
    if (CAN_TRANSPOSE && count == LANES)
        for (; e + LANES <= length; e += LANES) {
            Pack<R> v[LANES];
            for (int k = 0; k < LANES; ++k) v[k] = lanes[e + k];
            transpose(v);
            for (int t = 0; t < LANES; ++t) store(rows + t * length + e, v[t]);
        }
    for (; e < length; ++e)
        for (Index t = 0; t < count; ++t) rows[t * length + e] = lanes[e][t];
}

inline Index blocks_of(Index tokens) { return (tokens + LANES - 1) / LANES; }

// What is done for one token, by a thread; `make` gives every thread one of its own.
using PerToken = std::function<void(Index)>;
using MakePerToken = std::function<PerToken()>;

// H'[m] = sum_n res[m, n] H[n] + post[m] y, token by token; `streams` and `next` may be the same.
template <class S, class Y, class R = Real<S>>
MakePerToken finisher(const Sizes& sizes, const S* streams, const Y* y, const R* weights, S* next) {
    return [=] {
        // In place, a token's streams are needed until all of them are mixed.
        const bool in_place = streams == next;
        return [=, buffer = std::vector<S>(in_place ? sizes.width : 0)](Index t) mutable {
            const Index n = sizes.n, dim = sizes.dim;
            const S* h = streams + t * sizes.width;
            const R *res = weights + t * sizes.weights + n, *post = res + n * n;
            const Y* branch = y + t * dim;
            S* target = in_place ? buffer.data() : next + t * sizes.width;
            // The next token, which otherwise would be waited for.
            fetch(h + sizes.width, sizes.width), fetch(branch + dim, dim);
            if (!in_place) fetch_to_write(target + sizes.width, sizes.width);
            spans(n, dim, [&](Index begin, Index end) {
                by_four(n, [&](Index m, auto num_m) {
                    features<R>(begin, end, [&](Index d, auto kind, auto num) {
                        using V = decltype(kind);
                        constexpr int NM = num_m, U = num, W = Width<V>::value;
                        V acc[NM][U];
                        for (int u = 0; u < U; ++u) {
                            V value = load<V>(branch + d + u * W);
                            for (int k = 0; k < NM; ++k) acc[k][u] = value * post[m + k];
                        }
                        mix(acc, res + m * n, n, 1, h, n, dim, d);
                        for (int k = 0; k < NM; ++k)
                            for (int u = 0; u < U; ++u) store(target + (m + k) * dim + d + u * W, acc[k][u]);
                    });
                });
            });
            if (in_place) std::copy(buffer.begin(), buffer.end(), next + t * sizes.width);
        };
    };
}

// The gradients of y and of the routing weights of one token.
template <class S, class Y, class R = Real<S>>
MakePerToken finish_puller(const Sizes& sizes, const S* grad, const S* streams, const Y* y, const R* weights, Y* d_y,
                           R* d_weights) {
    return [=] {
        return [=](Index t) {
            const Index n = sizes.n, dim = sizes.dim;
            const S *g = grad + t * sizes.width, *h = streams + t * sizes.width;
            R *mine = d_weights + t * sizes.weights, *d_res = mine + n, *d_post = d_res + n * n;
            std::fill(mine, mine + sizes.weights, R(0));
            const Index pieces = dots_of(n, n, dim), bytes = sizes.width * sizeof(S);
            dots(g, n, dim, h, n, dim, dim, d_res, n, Ahead(g + sizes.width, bytes, pieces),
                 Ahead(h + sizes.width, bytes, pieces));
            fetch(y + (t + 1) * dim, dim), fetch_to_write(d_y + (t + 1) * dim, dim);
            dots(g, n, dim, y + t * dim, 1, dim, dim, d_post, 1);
            combine(weights + t * sizes.weights + n + n * n, g, n, dim, d_y + t * dim);
        };
    };
}

// `before`, if there is one, writes the streams of a token.
template <class S, class R = Real<S>>
void begin(const Plan& plan, Index tokens, int threads, bool project, const S* streams, const R* in_map, const R* out,
           const R* bias, S* x, R* weights, R* z, R* norms, const MakePerToken& before = nullptr) {
    const Sizes sizes(plan);
    over(blocks_of(tokens), threads, [&] {
        return [&, mixer = make_mixer<R>(plan), routing = Routing<R>(sizes),
                write = before ? before() : nullptr](Index block) mutable {
            using V = Pack<R>;
            const Index first = block * LANES, count = std::min<Index>(LANES, tokens - first);
            if (write)
                for (Index t = 0; t < count; ++t) write(first + t);
            const S* h = streams + first * sizes.width;
            R* rows = z + first * sizes.rows;
            if (project) {
                std::fill(rows, rows + count * sizes.rows, R(0));
                dots(h, count, sizes.width, in_map, sizes.rows, sizes.width, sizes.width, rows, sizes.rows);
            }
            V square = same<V>(1);
            for (Index t = 0; t < count; ++t) square[t] = squares<S, R>(h + t * sizes.width, sizes.width);
            for (int t = 0; t < LANES; ++t) {
                R mean = square[t] / R(sizes.width), eps = R(plan.norm_eps);
                R scale = R(1) / std::sqrt(plan.clamp ? std::max(mean, eps) : mean + eps);
                routing.rstd[t] = scale;
                if (t >= count) continue;
                norms[(first + t) * 2] = scale;
                // d rstd = slope * sum H dH.
                norms[(first + t) * 2 + 1] = plan.clamp && mean < eps ? R(0) : -scale * scale * scale / R(sizes.width);
            }
            to_lanes(rows, count, sizes.rows, routing.z.data());
            for (Index r = 0; r < sizes.rows; ++r) routing.bottleneck[r] = routing.z[r] * routing.rstd;
            routing.fill_logits(plan, sizes, out, bias);
            const Index n = sizes.n;
            V *pre = routing.weights.data(), *res = pre + n, *post = res + n * n;
            const V *logits = routing.logits.data(), *last = logits + n + plan.logits;
            for (Index k = 0; k < n; ++k) {
                pre[k] = sigmoid(logits[k]) + same<V>(plan.pre_eps);
                post[k] = sigmoid(last[k]) * same<V>(2);
            }
            mixer->forward(logits + n, res);
            R* mine = weights + first * sizes.weights;
            from_lanes(routing.weights.data(), count, sizes.weights, mine);
            if (x)
                for (Index t = 0; t < count; ++t)
                    combine(mine + t * sizes.weights, h + t * sizes.width, n, sizes.dim, x + (first + t) * sizes.dim);
        };
    });
}

// What a token's streams get through x and through mixing: dH[n] = pre[n] dx + sum_m res[m, n] G[m].
template <class S, class R>
void vjp_mixed(const Index n, const Index dim, const S* grad, const S* d_x, const R* weights, R* out) {
    spans(n, dim, [&](Index begin, Index end) {
        by_four(n, [&](Index k, auto num_k) {
            features<R>(begin, end, [&](Index d, auto kind, auto num) {
                using V = decltype(kind);
                constexpr int NK = num_k, U = num, W = Width<V>::value;
                V acc[NK][U] = {};
                if (d_x) mix(acc, weights + k, 1, 0, d_x, 1, dim, d);
                if (grad) mix(acc, weights + n + k, 1, n, grad, n, dim, d);
                R* target = out + k * dim + d;
                for (int i = 0; i < NK; ++i, target += dim)
                    for (int u = 0; u < U; ++u) store(target + u * W, acc[i][u]);
            });
        });
    });
}

// What a block's streams get through the routing, and what they give to the gradient of the map:
//     dH[n] = mixed[n] + own H[n] + sum_r dz[r] in_map[r, n],   din_map[r] += dz[r] H.
// `slopes` is dz, eight tokens for every row; `packed` and `sums` are maps in tiles. The block is in the second cache
// by now, so the order is that of the maps: four tokens share what is loaded of them. This is all arithmetic, so
// meanwhile the next block is fetched, what comes after `streams` and what comes after `grad`. Both sums are taken at
// once where there are registers for it.
template <class S, class R>
void vjp_routed(const Tiles tiles, const Index count, const S* streams, const S* grad, const R* mixed, const R* own,
                 const R* slopes, const R* packed, R* sums, S* out) {
    const Index n = tiles.streams, dim = tiles.dim, rows = tiles.rows, width = n * dim;
    constexpr int LINES = 4 * Tiles::SIZE / (2 * LANES);
    const Index bytes = LANES * width * sizeof(S), steps = n * (LANES / 4) * (dim / Tiles::SIZE) * LINES;
    Ahead next_streams(streams + LANES * width, bytes, steps), next_grad(grad + LANES * width, bytes, steps);
    for (Index k = 0; k < n; ++k) {
        by_four(count, [&](Index t, auto num_t) {
            features<R>(0, dim, [&](Index d, auto kind, auto num) {
                using V = decltype(kind);
                constexpr int NT = num_t, U = num, W = Width<V>::value;
                const S* h = streams + t * width + k * dim + d;
                const R* before = mixed + t * width + k * dim + d;
                S* target = out + t * width + k * dim + d;
                V acc[NT][U];
                times<NT>([&](auto a) {
                    times<U>([&](auto u) {
                        acc[a][u] = load<V>(before + a * width + u * W) + load<V>(h + a * width + u * W) * own[t + a];
                    });
                });
                next_streams.go(LINES), next_grad.go(LINES);
                const R *row = packed + tiles.at(k, d), *slope = slopes + t;
                R* sum = sums + tiles.at(k, d);
                V kept[NT][U];
                if constexpr (MANY_REGISTERS)
                    times<NT>([&](auto a) {
                        times<U>([&](auto u) { kept[a][u] = in_register(load<V>(h + a * width + u * W)); });
                    });
                for (Index r = 0; r < rows; ++r, row += Tiles::SIZE, sum += Tiles::SIZE, slope += LANES) {
                    V line[U];
                    times<U>([&](auto u) { line[u] = in_register(load<V>(row + u * W)); });
                    if constexpr (MANY_REGISTERS) {
                        V add[U];
                        times<U>([&](auto u) { add[u] = load<V>(sum + u * W); });
                        times<NT>([&](auto a) {
                            V each = in_register(same<V>(slope[a]));
                            times<U>([&](auto u) { acc[a][u] += line[u] * each, add[u] += kept[a][u] * each; });
                        });
                        times<U>([&](auto u) { store(sum + u * W, add[u]); });
                    } else {
                        times<NT>([&](auto a) { times<U>([&](auto u) { acc[a][u] += line[u] * slope[a]; }); });
                    }
                }
                times<NT>([&](auto a) { times<U>([&](auto u) { store(target + a * width + u * W, acc[a][u]); }); });
            });
        });
        if (MANY_REGISTERS || !rows) continue;
        by_four(count, [&](Index t, auto num_t) {
            features<R>(0, dim, [&](Index d, auto kind, auto num) {
                using V = decltype(kind);
                constexpr int NT = num_t, U = num, W = Width<V>::value;
                V h[NT][U];
                for (int a = 0; a < NT; ++a)
                    for (int u = 0; u < U; ++u) h[a][u] = load<V>(streams + (t + a) * width + k * dim + d + u * W);
                R* target = sums + tiles.at(k, d);
                for (Index r = 0; r < rows; ++r, target += Tiles::SIZE) {
                    V acc[U];
                    for (int u = 0; u < U; ++u) acc[u] = load<V>(target + u * W);
                    for (int a = 0; a < NT; ++a) {
                        V slope = in_register(same<V>(slopes[r * LANES + t + a]));
                        for (int u = 0; u < U; ++u) acc[u] += h[a][u] * slope;
                    }
                    for (int u = 0; u < U; ++u) store(target + u * W, acc[u]);
                }
            });
        });
    }
}

// Tokens whose sums over tokens are taken together; a function of the shape alone.
inline Index chunk_of(Index tokens) {
    const Index least = 256, most = 64;
    Index chunk = std::max(least, (tokens + most - 1) / most);
    return (chunk + LANES - 1) / LANES * LANES;
}

// `after`, if there is one, takes the gradient of a token's streams while it is in cache.
template <class S, class R = Real<S>>
void begin_backward(const Plan& plan, Index tokens, int threads, bool project, const S* grad, const S* d_x,
                    const R* d_weights, const S* streams, const R* in_map, const R* out, const R* bias,
                    const R* weights, const R* z, const R* norms, S* d_streams, R* d_in, R* d_z, R* d_out, R* d_bias,
                    const MakePerToken& after = nullptr) {
    const Sizes sizes(plan);
    const Index n = sizes.n, dim = sizes.dim;
    const Tiles tiles(project ? sizes.rows : 0, n, dim);
    const Index num_in = tiles.size();
    std::unique_ptr<R[]> packed(new R[std::max<Index>(1, num_in)]);
    tiles.each(in_map, [&](const R* row, Index tile, Index count) { std::copy_n(row, count, packed.get() + tile); });
    const Index chunk = chunk_of(tokens), chunks = (tokens + chunk - 1) / chunk,
                part = num_in + sizes.maps + sizes.biases;
    std::unique_ptr<R[]> parts(new R[std::max<Index>(1, chunks * part)]);
    over(chunks, threads, [&] {
        return [&, mixer = make_mixer<R>(plan), routing = Routing<R>(sizes), d_maps = std::vector<Pack<R>>(sizes.maps),
                d_biases = std::vector<Pack<R>>(sizes.biases), d_pre = std::vector<R>(LANES * n),
                earlier = after ? after() : nullptr,
                // Half precision is rounded once, at the end.
                wide = std::vector<R>(std::is_same_v<S, R> ? 0 : LANES * sizes.width)](Index c) mutable {
            using V = Pack<R>;
            R* sum_in = parts.get() + c * part;
            std::fill(sum_in, sum_in + num_in, R(0));
            std::fill(d_maps.begin(), d_maps.end(), V{});
            std::fill(d_biases.begin(), d_biases.end(), V{});
            const Index stop = std::min(tokens, (c + 1) * chunk);
            for (Index first = c * chunk; first < stop; first += LANES) {
                const Index count = std::min<Index>(LANES, stop - first);
                const S* h = streams + first * sizes.width;
                const R* mine = weights + first * sizes.weights;
                std::fill(d_pre.begin(), d_pre.end(), R(0));
                R* mixed;
                if constexpr (std::is_same_v<S, R>)
                    mixed = d_streams + first * sizes.width;
                else
                    mixed = wide.data();
                for (Index t = 0; t < count; ++t) {
                    const S* x = d_x ? d_x + (first + t) * dim : nullptr;
                    if (x) fetch(x + dim, dim);
                    fetch_to_write(mixed + (t + 1) * sizes.width, sizes.width);
                    if (x) dots(h + t * sizes.width, n, dim, x, 1, dim, dim, &d_pre[t * n], 1);
                    vjp_mixed(n, dim, grad ? grad + (first + t) * sizes.width : nullptr, x, mine + t * sizes.weights,
                               mixed + t * sizes.width);
                }

                to_lanes(z + first * sizes.rows, count, sizes.rows, routing.z.data());
                to_lanes(mine, count, sizes.weights, routing.weights.data());
                if (d_weights)
                    to_lanes(d_weights + first * sizes.weights, count, sizes.weights, routing.d_weights.data());
                else
                    std::fill(routing.d_weights.begin(), routing.d_weights.end(), V{});
                routing.rstd = routing.slope = V{};
                for (Index t = 0; t < count; ++t) {
                    routing.rstd[t] = norms[(first + t) * 2];
                    routing.slope[t] = norms[(first + t) * 2 + 1];
                    for (Index k = 0; k < n; ++k) routing.d_weights[k][t] += d_pre[t * n + k];
                }
                for (Index r = 0; r < sizes.rows; ++r) routing.bottleneck[r] = routing.z[r] * routing.rstd;
                routing.fill_logits(plan, sizes, out, bias);
                const V *pre = routing.weights.data(), *res = pre + n, *post = res + n * n;
                const V *g_pre = routing.d_weights.data(), *g_res = g_pre + n, *g_post = g_res + n * n;
                V *l_pre = routing.d_logits.data(), *l_res = l_pre + n, *l_post = l_res + plan.logits;
                for (Index k = 0; k < n; ++k) {
                    V gate = pre[k] - same<V>(plan.pre_eps);
                    l_pre[k] = g_pre[k] * gate * (same<V>(1) - gate);
                    l_post[k] = g_post[k] * post[k] * (same<V>(1) - post[k] * same<V>(0.5));
                }
                mixer->backward(routing.logits.data() + n, res, g_res, l_res);

                // Back through bias, output map and norm.
                V* sums = d_maps.data();
                const V *logit = routing.d_logits.data(), *row = routing.bottleneck.data();
                V *slope = routing.d_z.data(), d_rstd{};
                const R* map = out;
                for (Index o = 0; o < sizes.biases; ++o) d_biases[o] += logit[o];
                for (int head = 0; head < 3; ++head) {
                    const Index num = sizes.logits[head];
                    for (Index r = 0; r < plan.rows[head]; ++r) {
                        V sum = plan.direct[head] ? logit[r] : V{};
                        if (!plan.direct[head]) {
                            for (Index o = 0; o < num; ++o) {
                                sum += logit[o] * map[o];
                                sums[o] += logit[o] * row[r];
                            }
                            map += num, sums += num;
                        }
                        slope[r] = sum;
                    }
                    logit += num, row += plan.rows[head], slope += plan.rows[head];
                }
                for (Index r = 0; r < sizes.rows; ++r) {
                    d_rstd += routing.d_z[r] * routing.z[r];
                    routing.d_z[r] *= routing.rstd;
                }
                const V own = d_rstd * routing.slope;
                if (d_z) from_lanes(routing.d_z.data(), count, sizes.rows, d_z + first * sizes.rows);

                R factors[LANES];
                for (int t = 0; t < LANES; ++t) factors[t] = own[t];
                const R* slopes = reinterpret_cast<const R*>(routing.d_z.data());
                vjp_routed(tiles, count, h, grad ? grad + first * sizes.width : h, mixed, factors, slopes,
                            packed.get(), sum_in, d_streams + first * sizes.width);
                if (earlier)
                    for (Index t = 0; t < count; ++t) earlier(first + t);
            }
            R* rest = sum_in + num_in;
            for (Index e = 0; e < sizes.maps; ++e) *rest++ = total(d_maps[e]);
            for (Index o = 0; o < sizes.biases; ++o) *rest++ = total(d_biases[o]);
        };
    });
    // Chunk after chunk, in their order.
    auto reduce = [&](Index offset, Index count, R* target) {
        const Index piece = 4096;
        over((count + piece - 1) / piece, threads, [&] {
            return [&](Index k) {
                const Index stop = std::min(count, (k + 1) * piece);
                for (Index e = k * piece; e < stop; ++e) target[e] = chunks ? parts[offset + e] : R(0);
                for (Index c = 1; c < chunks; ++c)
                    for (Index e = k * piece; e < stop; ++e) target[e] += parts[c * part + offset + e];
            };
        });
    };
    if (project) {
        reduce(0, num_in, packed.get());
        tiles.each(d_in, [&](R* row, Index tile, Index count) { std::copy_n(packed.get() + tile, count, row); });
    }
    reduce(num_in, sizes.maps, d_out);
    reduce(num_in + sizes.maps, sizes.biases, d_bias);
}

// A mixer by itself: logits (tokens, *logit_shape) -> res (tokens, N, N), or the gradient back.
template <class R>
void mixer(const Plan& plan, Index tokens, int threads, const R* logits, const R* res, const R* grad, R* target) {
    const Index entries = plan.streams * plan.streams, num = plan.logits;
    over(blocks_of(tokens), threads, [&] {
        return [&, mixer = make_mixer<R>(plan), in = std::vector<Pack<R>>(num), matrix = std::vector<Pack<R>>(entries),
                slope = std::vector<Pack<R>>(entries),
                result = std::vector<Pack<R>>(std::max(num, entries))](Index block) mutable {
            const Index first = block * LANES, count = std::min<Index>(LANES, tokens - first);
            to_lanes(logits + first * num, count, num, in.data());
            if (!grad) {
                mixer->forward(in.data(), result.data());
                from_lanes(result.data(), count, entries, target + first * entries);
                return;
            }
            to_lanes(res + first * entries, count, entries, matrix.data());
            to_lanes(grad + first * entries, count, entries, slope.data());
            mixer->backward(in.data(), matrix.data(), slope.data(), result.data());
            from_lanes(result.data(), count, num, target + first * num);
        };
    });
}

}  // namespace
}  // namespace temper

// The interface: `begin` and `mixer` in the stored type, `finish` for each type of branch output. STORED is given
// by the compiler: only what is used is compiled.
using temper::BFloat16;
using temper::Plan;
using S = STORED;
using R = temper::Real<S>;
using std::int64_t;

extern "C" void begin(const Plan* plan, int64_t tokens, int threads, int project, const S* streams, const R* in_map,
                      const R* out, const R* bias, S* x, R* weights, R* z, R* norms) {
    temper::begin<S>(*plan, tokens, threads, project, streams, in_map, out, bias, x, weights, z, norms);
}

extern "C" void begin_backward(const Plan* plan, int64_t tokens, int threads, int project, const S* grad, const S* d_x,
                               const R* d_weights, const S* streams, const R* in_map, const R* out, const R* bias,
                               const R* weights, const R* z, const R* norms, S* d_streams, R* d_in, R* d_z, R* d_out,
                               R* d_bias) {
    temper::begin_backward<S>(*plan, tokens, threads, project, grad, d_x, d_weights, streams, in_map, out, bias,
                              weights, z, norms, d_streams, d_in, d_z, d_out, d_bias);
}

extern "C" void mixer(const Plan* plan, int64_t tokens, int threads, const R* logits, const R* res, const R* grad,
                      R* target) {
    temper::mixer<R>(*plan, tokens, threads, logits, res, grad, target);
}

extern "C" void fold(const int64_t* form, int64_t threads, const R* const* tensors, R* in_map, R* out, R* bias) {
    temper::fold<R>(form, threads, tensors, in_map, out, bias);
}

extern "C" void fold_backward(const int64_t* form, int64_t threads, const R* const* tensors, const R* d_in,
                              const R* d_out, const R* d_bias, R* const* slopes) {
    temper::fold_backward<R>(form, threads, tensors, d_in, d_out, d_bias, slopes);
}

// y in the type of the streams, or in the other of float and bfloat16.
#define FINISH(NAME, Y)                                                                                              \
    extern "C" void finish##NAME(const Plan* plan, int64_t tokens, int threads, const S* streams, const Y* y,        \
                                 const R* weights, S* next) {                                                        \
        temper::over(tokens, threads, temper::finisher(temper::Sizes(*plan), streams, y, weights, next));            \
    }                                                                                                                \
    extern "C" void finish_backward##NAME(const Plan* plan, int64_t tokens, int threads, const S* grad,              \
                                          const S* streams, const Y* y, const R* weights, Y* d_y, R* d_weights) {    \
        const temper::Sizes sizes(*plan);                                                                            \
        temper::over(tokens, threads, temper::finish_puller(sizes, grad, streams, y, weights, d_y, d_weights));      \
    }                                                                                                                \
    extern "C" void finish_begin##NAME(const Plan* plan, int64_t tokens, int threads, const S* streams, const Y* y,  \
                                       const R* weights, const R* in_map, const R* out, const R* bias, S* next,      \
                                       S* x, R* next_weights, R* z, R* norms) {                                      \
        const temper::Sizes sizes(*plan);                                                                            \
        temper::begin<S>(*plan, tokens, threads, true, next, in_map, out, bias, x, next_weights, z, norms,           \
                         temper::finisher(sizes, streams, y, weights, next));                                        \
    }                                                                                                                \
    extern "C" void finish_begin_backward##NAME(                                                                     \
        const Plan* plan, int64_t tokens, int threads, const S* grad, const S* d_x, const R* d_next_weights,         \
        const S* next, const R* in_map, const R* out, const R* bias, const R* next_weights, const R* z,              \
        const R* norms, const S* streams, const Y* y, const R* weights, S* d_next, R* d_in, R* d_out, R* d_bias,     \
        Y* d_y, R* d_weights) {                                                                                      \
        const temper::Sizes sizes(*plan);                                                                            \
        const S* made = d_next;                                                                                      \
        temper::begin_backward<S, R>(*plan, tokens, threads, true, grad, d_x, d_next_weights, next, in_map, out,      \
                                     bias, next_weights, z, norms, d_next, d_in, nullptr, d_out, d_bias,             \
                                     temper::finish_puller(sizes, made, streams, y, weights, d_y, d_weights));       \
    }

using Other = std::conditional_t<sizeof(S) == 4, BFloat16, R>;
FINISH(, S)
FINISH(_other, Other)
