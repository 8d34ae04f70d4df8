// Loops that the kernels share: rows against rows, rows mixed into rows, and threads.
#pragma once

#include <algorithm>

#include "lanes.h"

namespace temper {

template <int value>
using Const = std::integral_constant<int, value>;

// f(0), f(1), .. with constants, written out: what they index then lives in registers.
template <class F, int... K>
inline void times(F&& f, std::integer_sequence<int, K...>) {
    (f(Const<K>{}), ...);
}
template <int COUNT, class F>
inline void times(F&& f) {
    times(f, std::make_integer_sequence<int, COUNT>{});
}

// f(start, size) over `count` things, four, two or one at a time.
template <class F>
inline void by_four(Index count, F&& f) {
    Index k = 0;
    for (; k + 4 <= count; k += 4) f(k, Const<4>{});
    if (k + 2 <= count) f(k, Const<2>{}), k += 2;
    if (k < count) f(k, Const<1>{});
}

// The same, three, two or one at a time: four by three sums fill the registers. With many of them, four by six do.
template <bool many, class F>
inline void by_most(Index count, F&& f) {
    Index k = 0;
    if constexpr (many) {
        // Eight are four and four.
        for (; count - k >= 6 && count - k != 8; k += 6) f(k, Const<6>{});
        for (; count - k >= 4; k += 4) f(k, Const<4>{});
    }
    for (; count - k >= 3; k += 3) f(k, Const<3>{});
    if (count - k == 2) f(k, Const<2>{});
    if (count - k == 1) f(k, Const<1>{});
}

// f(feature, vector, how many vectors) over a range of features: the widest vectors, then packs, then single numbers.
template <class R, class F>
inline void features(Index begin, Index end, F&& f) {
    Index d = begin;
    constexpr int WIDE = Width<Wide<R>>::value;
    for (; d + 2 * WIDE <= end; d += 2 * WIDE) f(d, Wide<R>{}, Const<2>{});
    if (WIDE > LANES && d + WIDE <= end) f(d, Wide<R>{}, Const<1>{}), d += WIDE;
    if (d + LANES <= end) f(d, Pack<R>{}, Const<1>{}), d += LANES;
    for (; d < end; ++d) f(d, R{}, Const<1>{});
}

// Features that are worked on before the next row: few enough for the caches, and so many that adding up a vector at
// the end of each span costs little.
constexpr Index SPAN = 2048;

// f(begin, end) over spans of features so short that half of a first cache of 32 KB holds `rows` rows of them.
template <class F>
inline void spans(Index rows, Index dim, F&& f) {
    const Index span = std::max<Index>(64, 4096 / rows / 64 * 64);
    for (Index begin = 0; begin < dim; begin += span) f(begin, std::min(dim, begin + span));
}

// Fetches a row that is wanted soon, to read it or to write it, unless it would fill the first cache. Streams come from
// memory, and what a CPU fetches by itself comes too late.
constexpr Index LINE = 64, LONGEST = 32 * 1024;
template <class T>
inline void fetch(const T* row, Index length) {
    const Index bytes = length * sizeof(T);
    for (Index b = 0; b < bytes && bytes <= LONGEST; b += LINE)
        __builtin_prefetch(reinterpret_cast<const char*>(row) + b);
}
template <class T>
inline void fetch_to_write(const T* row, Index length) {
    const Index bytes = length * sizeof(T);
    for (Index b = 0; b < bytes && bytes <= LONGEST; b += LINE)
        __builtin_prefetch(reinterpret_cast<const char*>(row) + b, 1);
}

// Fetches `bytes` from `from` on, which are wanted soon, in as many steps as `go` will be called.
struct Ahead {
    Ahead(const void* from, Index bytes, Index steps)
        : at(static_cast<const char*>(from)), step((bytes + steps - 1) / std::max<Index>(1, steps)) {}
    void go() { __builtin_prefetch(at), at += step; }
    void go(int count) {
        for (int k = 0; k < count; ++k) go();
    }
    const char* at;
    Index step;
};
struct Nothing {
    void go(int) {}
};

// About how often `dots` calls `go`.
inline Index dots_of(Index num_left, Index num_right, Index length) {
    return (num_right + 2) / 3 * ((num_left + 3) / 4) * (length / LANES);
}

// sums[a * stride + b] += <left row a, right row b> over `length` entries.
template <class A, class B, class R, class F = Nothing>
inline void dots(const A* left, Index num_left, Index left_stride, const B* right, Index num_right, Index right_stride,
                 Index length, R* sums, Index stride, F next_left = {}, F next_right = {}) {
    constexpr int WIDE = Width<Wide<R>>::value;
    // Fetching takes its time: more passes leave more of it.
    constexpr bool many = MANY_REGISTERS && std::is_same_v<F, Nothing>;
    for (Index begin = 0; begin < length; begin += SPAN) {
        const Index end = std::min(length, begin + SPAN);
        by_most<many>(num_right, [&](Index b, auto num_b) {
            by_four(num_left, [&](Index a, auto num_a) {
                // A few sums would keep waiting for themselves, so each is taken in parts.
                constexpr int NA = num_a, NB = num_b, PARTS = NB > 1 ? 1 : MANY_REGISTERS ? 4 : 2;
                const A* lines = left + a * left_stride;
                const B* rows = right + b * right_stride;
                Wide<R> sum[PARTS][NA][NB] = {};
                auto add = [&](Index d, auto part) {
                    next_left.go(WIDE / LANES), next_right.go(WIDE / LANES);
                    Wide<R> row[NB];
                    times<NB>([&](auto j) { row[j] = load<Wide<R>>(rows + j * right_stride + d); });
                    times<NA>([&](auto i) {
                        Wide<R> line = load<Wide<R>>(lines + i * left_stride + d);
                        times<NB>([&](auto j) { sum[part][i][j] += line * row[j]; });
                    });
                };
                Index d = begin;
#pragma GCC unroll 2
                for (; d + PARTS * WIDE <= end; d += PARTS * WIDE)
                    times<PARTS>([&](auto part) { add(d + part * WIDE, part); });
                if constexpr (PARTS > 1)
                    for (; d + WIDE <= end; d += WIDE) add(d, Const<0>{});
                for (int i = 0; i < NA; ++i)
                    for (int j = 0; j < NB; ++j) {
                        Wide<R> all = sum[0][i][j];
                        for (int part = 1; part < PARTS; ++part) all += sum[part][i][j];
                        R rest = total(all);
                        for (Index k = d; k < end; ++k)
                            rest += load<R>(lines + i * left_stride + k) * load<R>(rows + j * right_stride + k);
                        sums[(a + i) * stride + b + j] += rest;
                    }
            });
        });
    }
}

template <class S, class R>
inline R squares(const S* row, Index length) {
    constexpr int WIDE = Width<Wide<R>>::value, PARTS = 4;
    R result{};
    for (Index begin = 0; begin < length; begin += SPAN) {
        Index end = std::min(length, begin + SPAN), d = begin;
        Wide<R> sum[PARTS] = {};
        auto add = [&](Index from, auto part) {
            Wide<R> v = load<Wide<R>>(row + from);
            sum[part] += v * v;
        };
        for (; d + PARTS * WIDE <= end; d += PARTS * WIDE) times<PARTS>([&](auto part) { add(d + part * WIDE, part); });
        for (; d + WIDE <= end; d += WIDE) add(d, Const<0>{});
        R rest = total((sum[0] + sum[1]) + (sum[2] + sum[3]));
        for (; d < end; ++d) rest += load<R>(row + d) * load<R>(row + d);
        result += rest;
    }
    return result;
}

// acc[k][u] += sum_i weights[k * step_k + i * step_i] rows[i][d + u].
template <class V, int NK, int U, class S, class R>
inline void mix(V (&acc)[NK][U], const R* weights, Index step_k, Index step_i, const S* rows, Index num_rows,
                Index stride, Index d) {
    for (Index i = 0; i < num_rows; ++i) {
        V row[U];
        times<U>([&](auto u) { row[u] = in_register(load<V>(rows + i * stride + d + u * Width<V>::value)); });
        times<NK>([&](auto k) {
            R weight = weights[k * step_k + i * step_i];
            times<U>([&](auto u) { acc[k][u] += row[u] * weight; });
        });
    }
}

// Has `threads` threads work on the blocks; `make` gives each a worker of its own.
template <class Make>
inline void over(Index count, int threads, Make&& make) {
#pragma omp parallel num_threads(threads) if (threads > 1 && count > 1)
    {
        auto work = make();
#pragma omp for schedule(static)
        for (Index k = 0; k < count; ++k) work(k);
    }
}

}  // namespace temper
