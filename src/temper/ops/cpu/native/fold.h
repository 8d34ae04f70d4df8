// The weights of a site folded together, generators, gain and gates, and the gradients back.
//
// Every generator's input map is, for the rows (bottleneck, stream) one below the other and in groups,
//     in_map[group, member] = gain[stream] * sum_j weights[group, member, j] lines[group, j],
// with weights from the small tensors, and lines over the features: those of the one tensor that has them (bases), or
// mixtures of these by a core. A kind of generator says what its groups and weights are and makes its output map; all
// that is long is done here.
#pragma once

#include <memory>
#include <vector>

#include "passes.h"

namespace temper {

// In the order of `temper.ops.plan.FORMS`.
enum Kind : Index { DENSE, CP, TUCKER, TT };
// In the order of `temper.norm.GAINS`.
enum Gain : Index { FULL, RANK_ONE, FEATURE, NONE };

// Features that are folded before the next; sums over features are taken chunk by chunk.
constexpr Index CHUNK = 256;

// One generator as it is stored; `slopes` are the gradients of its tensors, to be written.
template <class R>
struct Stored {
    Index groups, members, inner, rows, logits, tensors, holder, stride;
    // How many bases a core mixes; 0 where the lines are stored themselves.
    Index bases = 0;
    bool direct = false;
    const R* const* stored;
    R* const* slopes;

    virtual ~Stored() = default;
    // Where a base, or the line of a group and j, has its first feature in tensor `holder`; the next is `stride`
    // further.
    virtual Index offset(Index line) const = 0;
    virtual void weights(R* weights) const = 0;
    virtual void vjp_weights(const R* d_weights) const = 0;
    // The core (lines, bases).
    virtual void core(R*) const {}
    virtual void vjp_core(const R*) const {}
    // The output map (rows, logits).
    virtual void out(R*) const {}
    virtual void vjp_out(const R*) const {}

    Index lines() const { return groups * inner; }
    Index num_stored() const { return bases ? bases : lines(); }
    Index num_weights() const { return groups * members * inner; }
    Index num_core() const { return lines() * bases; }
    R gate() const { return *stored[tensors]; }

    void load(Index begin, Index length, R* lines) const {
        each_piece(begin, length, [&](Index at, Index from, Index count) {
            for (Index d = 0; d < count; ++d) lines[at + d] = stored[holder][from + d * stride];
        });
    }
    void save(Index begin, Index length, const R* lines) const {
        each_piece(begin, length, [&](Index at, Index to, Index count) {
            for (Index d = 0; d < count; ++d) slopes[holder][to + d * stride] = lines[at + d];
        });
    }

   private:
    // Sixteen features of all lines before the next: what is stored between them is still in the first cache.
    template <class F>
    void each_piece(Index begin, Index length, F&& f) const {
        const Index piece = 16;
        for (Index d = 0; d < length; d += piece)
            for (Index k = 0; k < num_stored(); ++k)
                f(k * CHUNK + d, offset(k) + (begin + d) * stride, std::min(piece, length - d));
    }
};

// W (N, D, O) itself.
template <class R>
struct Dense : Stored<R> {
    Index n, dim;
    Dense(Index n, Index dim, Index logits) : n(n), dim(dim) {
        this->groups = logits * n, this->members = this->inner = 1, this->rows = this->logits = logits;
        this->tensors = 1, this->holder = 0, this->stride = logits, this->direct = true;
    }
    Index offset(Index line) const override { return line % n * dim * this->logits + line / n; }
    void weights(R* weights) const override { std::fill(weights, weights + this->groups, R(1)); }
    void vjp_weights(const R*) const override {}
};

// Output maps are made mode by mode: from `before`, the map of the modes up to here, and the tensor of the next one.
template <class R>
struct Chained : Stored<R> {
    std::vector<Index> modes;
    // The number of entries up to mode k.
    virtual Index entries(Index k) const = 0;
    virtual void begin(R* map) const = 0;
    virtual void vjp_begin(const R* d_map) const = 0;
    virtual void extend(Index k, const R* before, R* map) const = 0;
    // Writes the gradient of the tensor, and adds to that of `before`, which is zero.
    virtual void vjp_extend(Index k, const R* before, const R* d_map, R* d_before) const = 0;

    void out(R* map) const override {
        auto maps = all();
        std::copy(maps.back().begin(), maps.back().end(), map);
    }
    void vjp_out(const R* d_map) const override {
        auto maps = all();
        std::vector<R> slope(d_map, d_map + entries(modes.size() - 1));
        for (Index k = modes.size() - 1; k > 0; --k) {
            std::vector<R> before(entries(k - 1));
            vjp_extend(k, maps[k - 1].data(), slope.data(), before.data());
            slope.swap(before);
        }
        vjp_begin(slope.data());
    }

   private:
    std::vector<std::vector<R>> all() const {
        std::vector<std::vector<R>> maps;
        for (Index k = 0; k < Index(modes.size()); ++k) {
            maps.emplace_back(entries(k));
            if (k == 0)
                begin(maps[0].data());
            else
                extend(k, maps[k - 1].data(), maps[k].data());
        }
        return maps;
    }
};

// The transposed factor (mode, rank) -> (rank, mode), and back.
template <class R>
void transpose(const R* from, Index rows, Index columns, R* to) {
    for (Index i = 0; i < rows; ++i)
        for (Index j = 0; j < columns; ++j) to[j * rows + i] = from[i * columns + j];
}

// The same weights for every group, and the sum of their gradients.
template <class R>
void repeat(const R* from, Index count, Index groups, R* to) {
    for (Index g = 0; g < groups; ++g) std::copy_n(from, count, to + g * count);
}
template <class R>
void add_up(const R* from, Index count, Index groups, R* to) {
    std::fill_n(to, count, R(0));
    for (Index g = 0; g < groups; ++g)
        for (Index e = 0; e < count; ++e) to[e] += from[g * count + e];
}

// u (N, R), c (D, R), v (O, R) ..
template <class R>
struct Cp : Chained<R> {
    Index n;
    Cp(Index n, Index, std::vector<Index> modes, const Index* rank) : n(n) {
        this->modes = modes;
        this->rows = this->groups = this->stride = rank[0];
        this->members = n, this->inner = 1, this->tensors = 2 + modes.size(), this->holder = 1;
        this->logits = entries(modes.size() - 1) / this->rows;
    }
    Index offset(Index line) const override { return line; }
    void weights(R* weights) const override { transpose(this->stored[0], n, this->rows, weights); }
    void vjp_weights(const R* d_weights) const override { transpose(d_weights, this->rows, n, this->slopes[0]); }

    Index entries(Index k) const override {
        Index count = this->rows;
        for (Index i = 0; i <= k; ++i) count *= this->modes[i];
        return count;
    }
    void begin(R* map) const override { transpose(this->stored[2], this->modes[0], this->rows, map); }
    void vjp_begin(const R* d_map) const override { transpose(d_map, this->rows, this->modes[0], this->slopes[2]); }
    void extend(Index k, const R* before, R* map) const override {
        const Index rank = this->rows, mode = this->modes[k], count = entries(k - 1) / rank;
        for (Index q = 0; q < rank; ++q)
            for (Index x = 0; x < count; ++x)
                for (Index o = 0; o < mode; ++o) *map++ = before[q * count + x] * this->stored[2 + k][o * rank + q];
    }
    void vjp_extend(Index k, const R* before, const R* d_map, R* d_before) const override {
        const Index rank = this->rows, mode = this->modes[k], count = entries(k - 1) / rank;
        std::fill_n(this->slopes[2 + k], mode * rank, R(0));
        for (Index q = 0; q < rank; ++q)
            for (Index x = 0; x < count; ++x)
                for (Index o = 0; o < mode; ++o, ++d_map) {
                    d_before[q * count + x] += *d_map * this->stored[2 + k][o * rank + q];
                    this->slopes[2 + k][o * rank + q] += *d_map * before[q * count + x];
                }
    }
};

// core (A, B, P, Q ..), then U (N, A), C (D, B), V (O, P) ..
template <class R>
struct Tucker : Chained<R> {
    Index n;
    std::vector<Index> ranks;
    Tucker(Index n, Index, std::vector<Index> modes, const Index* rank) : n(n), ranks(rank, rank + 2 + modes.size()) {
        this->modes = modes;
        this->rows = 1;
        for (Index k = 0; k < Index(modes.size()); ++k) this->rows *= ranks[2 + k];
        this->groups = this->rows, this->members = n, this->inner = ranks[0];
        this->bases = this->stride = ranks[1];
        this->tensors = 3 + modes.size(), this->holder = 2;
        this->logits = entries(modes.size() - 1) / this->rows;
    }
    Index offset(Index line) const override { return line; }
    void weights(R* weights) const override { repeat(this->stored[1], n * ranks[0], this->rows, weights); }
    void vjp_weights(const R* d_weights) const override {
        add_up(d_weights, n * ranks[0], this->rows, this->slopes[1]);
    }
    // Line (r, a) is sum_b core[a, b, r] C[b].
    void core(R* core) const override {
        each_core([&](Index at, Index from) { core[at] = this->stored[0][from]; });
    }
    void vjp_core(const R* d_core) const override {
        each_core([&](Index at, Index to) { this->slopes[0][to] = d_core[at]; });
    }
    template <class F>
    void each_core(F&& f) const {
        const Index a_max = ranks[0], b_max = ranks[1], rows = this->rows;
        for (Index a = 0; a < a_max; ++a)
            for (Index b = 0; b < b_max; ++b)
                for (Index r = 0; r < rows; ++r) f((r * a_max + a) * b_max + b, (a * b_max + b) * rows + r);
    }

    Index entries(Index k) const override {
        Index count = 1;
        for (Index i = 0; i <= k; ++i) count *= this->modes[i] * ranks[2 + i];
        return count;
    }
    void begin(R* map) const override { transpose(this->stored[3], this->modes[0], ranks[2], map); }
    void vjp_begin(const R* d_map) const override { transpose(d_map, ranks[2], this->modes[0], this->slopes[3]); }
    // Kronecker in the ranks, outer in the modes: (P, X) and (O, Q) make (P * Q, X * O).
    void extend(Index k, const R* before, R* map) const override {
        each_out(k, [&](Index x, Index v) { *map++ = before[x] * this->stored[3 + k][v]; });
    }
    void vjp_extend(Index k, const R* before, const R* d_map, R* d_before) const override {
        std::fill_n(this->slopes[3 + k], this->modes[k] * ranks[2 + k], R(0));
        each_out(k, [&](Index x, Index v) {
            d_before[x] += *d_map * this->stored[3 + k][v];
            this->slopes[3 + k][v] += *d_map++ * before[x];
        });
    }
    template <class F>
    void each_out(Index k, F&& f) const {
        Index p_max = 1;
        for (Index i = 0; i < k; ++i) p_max *= ranks[2 + i];
        const Index count = entries(k - 1) / p_max, q_max = ranks[2 + k], mode = this->modes[k];
        for (Index p = 0; p < p_max; ++p)
            for (Index q = 0; q < q_max; ++q)
                for (Index x = 0; x < count; ++x)
                    for (Index o = 0; o < mode; ++o) f(p * count + x, o * q_max + q);
    }
};

// G (1, N, A), G (A, D, R), G (R, O, B), .. , G (Z, O, 1).
template <class R>
struct Tt : Chained<R> {
    Index n, dim;
    std::vector<Index> bonds;
    Tt(Index n, Index dim, std::vector<Index> modes, const Index* rank)
        : n(n), dim(dim), bonds(rank, rank + 1 + modes.size()) {
        bonds.push_back(1);
        this->modes = modes;
        this->rows = this->groups = this->stride = bonds[1];
        this->members = n, this->inner = bonds[0];
        this->tensors = 2 + modes.size(), this->holder = 1;
        this->logits = entries(modes.size() - 1) / this->rows;
    }
    Index offset(Index line) const override { return line % this->inner * dim * this->rows + line / this->inner; }
    void weights(R* weights) const override { repeat(this->stored[0], n * this->inner, this->rows, weights); }
    void vjp_weights(const R* d_weights) const override {
        add_up(d_weights, n * this->inner, this->rows, this->slopes[0]);
    }

    Index entries(Index k) const override {
        Index count = bonds[1] * bonds[2 + k];
        for (Index i = 0; i <= k; ++i) count *= this->modes[i];
        return count;
    }
    void begin(R* map) const override { std::copy_n(this->stored[2], entries(0), map); }
    void vjp_begin(const R* d_map) const override { std::copy_n(d_map, entries(0), this->slopes[2]); }
    // (X, B) and (B, O, C) make (X, O, C).
    void extend(Index k, const R* before, R* map) const override {
        const Index bond = bonds[1 + k], count = entries(k - 1) / bond, width = this->modes[k] * bonds[2 + k];
        std::fill(map, map + count * width, R(0));
        for (Index x = 0; x < count; ++x)
            for (Index b = 0; b < bond; ++b)
                for (Index e = 0; e < width; ++e)
                    map[x * width + e] += before[x * bond + b] * this->stored[2 + k][b * width + e];
    }
    void vjp_extend(Index k, const R* before, const R* d_map, R* d_before) const override {
        const Index bond = bonds[1 + k], count = entries(k - 1) / bond, width = this->modes[k] * bonds[2 + k];
        std::fill_n(this->slopes[2 + k], bond * width, R(0));
        for (Index x = 0; x < count; ++x)
            for (Index b = 0; b < bond; ++b)
                for (Index e = 0; e < width; ++e) {
                    d_before[x * bond + b] += d_map[x * width + e] * this->stored[2 + k][b * width + e];
                    this->slopes[2 + k][b * width + e] += d_map[x * width + e] * before[x * bond + b];
                }
    }
};

// All of a site. `form` is N, D, the gain, and for pre, res and post the kind, the number of output modes, the modes
// and the ranks. Tensors come in this order: the gain's; then for every head the generator's, its gate and its bias.
template <class R>
struct Site {
    Index n, dim, gain;
    std::unique_ptr<Stored<R>> heads[3];
    const R* const* tensors;
    R* const* slopes;

    Site(const Index* form, const R* const* tensors, R* const* slopes)
        : n(form[0]), dim(form[1]), gain(form[2]), tensors(tensors), slopes(slopes) {
        form += 3;
        Index next = gain == NONE ? 0 : gain == RANK_ONE ? 2 : 1;
        for (auto& head : heads) {
            const Index kind = *form++, count = *form++;
            const std::vector<Index> modes(form, form + count);
            form += count;
            if (kind == DENSE) {
                Index logits = 1;
                for (Index mode : modes) logits *= mode;
                head.reset(new Dense<R>(n, dim, logits));
            } else if (kind == CP) {
                head.reset(new Cp<R>(n, dim, modes, form)), form += 1;
            } else if (kind == TUCKER) {
                head.reset(new Tucker<R>(n, dim, modes, form)), form += 2 + count;
            } else {
                head.reset(new Tt<R>(n, dim, modes, form)), form += 1 + count;
            }
            head->stored = tensors + next;
            head->slopes = slopes + next;
            next += head->tensors + 2;
        }
    }

    Index chunks() const { return (dim + CHUNK - 1) / CHUNK; }
    // The weights and the core of every head below each other.
    Index num_small() const {
        Index count = 0;
        for (const auto& head : heads) count += head->num_weights() + head->num_core();
        return count;
    }
    template <class F>
    Index most(F&& of) const {
        return std::max({of(*heads[0]), of(*heads[1]), of(*heads[2])});
    }
    // The gate of a head without an output map is in its weights.
    std::vector<R> all_small() const {
        std::vector<R> all(num_small());
        R* next = all.data();
        for (const auto& head : heads) {
            head->weights(next);
            if (head->direct)
                for (Index e = 0; e < head->num_weights(); ++e) next[e] *= head->gate();
            head->core(next + head->num_weights());
            next += head->num_weights() + head->num_core();
        }
        return all;
    }

    void load_gain(Index begin, Index length, R* rows) const {
        for (Index k = 0; k < n; ++k, rows += CHUNK)
            for (Index d = 0; d < length; ++d) {
                const Index feature = begin + d;
                rows[d] = gain == FULL       ? tensors[0][k * dim + feature]
                          : gain == RANK_ONE ? tensors[0][k] * tensors[1][feature]
                          : gain == FEATURE  ? tensors[0][feature]
                                             : R(1);
            }
    }
    // The gradient of the gain's tensors; of those over streams only what this chunk adds, (N).
    void save_gain(Index begin, Index length, const R* d_rows, R* of_streams) const {
        for (Index k = 0; k < n; ++k, d_rows += CHUNK)
            for (Index d = 0; d < length; ++d) {
                const Index feature = begin + d;
                if (gain == FULL) slopes[0][k * dim + feature] = d_rows[d];
                if (gain == FEATURE) slopes[0][feature] = (k ? slopes[0][feature] : R(0)) + d_rows[d];
                if (gain == RANK_ONE) {
                    of_streams[k] += d_rows[d] * tensors[1][feature];
                    slopes[1][feature] = (k ? slopes[1][feature] : R(0)) + d_rows[d] * tensors[0][k];
                }
            }
    }
};

// f(k, d, sum_i weights[k * step_k + i * step_i] rows[i][d ..]) over rows of a chunk, vector by vector.
template <class R, class F>
void each_mixed(const R* weights, Index step_k, Index step_i, const R* rows, Index num_rows, Index count, Index length,
                F&& f) {
    by_four(count, [&](Index k, auto num_k) {
        features<R>(0, length, [&](Index d, auto kind, auto num) {
            using V = decltype(kind);
            constexpr int NK = num_k, U = num;
            V acc[NK][U] = {};
            mix(acc, weights + k * step_k, step_k, step_i, rows, num_rows, CHUNK, d);
            for (int i = 0; i < NK; ++i)
                for (int u = 0; u < U; ++u) f(k + i, d + u * Width<V>::value, acc[i][u]);
        });
    });
}

template <class R>
void mix_rows(const R* weights, Index step_k, Index step_i, const R* rows, Index num_rows, Index count, Index length,
              R* out) {
    each_mixed(weights, step_k, step_i, rows, num_rows, count, length,
               [&](Index k, Index d, auto value) { store(out + k * CHUNK + d, value); });
}

// The lines of a head in a chunk of features, and their gradients on the way back.
template <class R>
struct Lines {
    std::vector<R> bases, lines, d_bases, d_lines;
    Lines(const Site<R>& site, bool back) {
        const Index all = site.most([](const Stored<R>& head) { return head.lines(); }) * CHUNK;
        const Index mixed = site.most([](const Stored<R>& head) { return head.bases; }) * CHUNK;
        bases.resize(std::max(all, mixed)), lines.resize(mixed ? all : 0);
        if (back) d_bases.resize(mixed), d_lines.resize(all);
    }

    const R* load(const Stored<R>& head, const R* core, Index begin, Index length) {
        head.load(begin, length, bases.data());
        if (!head.bases) return bases.data();
        mix_rows(core, head.bases, 1, bases.data(), head.bases, head.lines(), length, lines.data());
        return lines.data();
    }
    // Writes the gradient of what is stored, and adds to that of the core.
    void vjp(const Stored<R>& head, const R* core, Index begin, Index length, R* d_core) {
        if (head.bases) {
            dots(d_lines.data(), head.lines(), CHUNK, bases.data(), head.bases, CHUNK, length, d_core, head.bases);
            mix_rows(core, 1, head.bases, d_lines.data(), head.lines(), head.bases, length, d_bases.data());
        }
        head.save(begin, length, head.bases ? d_bases.data() : d_lines.data());
    }
};

template <class R>
void fold(const Index* form, int threads, const R* const* tensors, R* in_map, R* out, R* bias) {
    const Site<R> site(form, tensors, nullptr);
    const Index n = site.n, dim = site.dim;
    const std::vector<R> small = site.all_small();
    for (const auto& head : site.heads) {
        if (!head->direct) {
            head->out(out);
            const Index count = head->rows * head->logits;
            for (Index e = 0; e < count; ++e) out[e] *= head->gate();
            out += count;
        }
        bias = std::copy_n(head->stored[head->tensors + 1], head->logits, bias);
    }
    over(site.chunks(), threads, [&] {
        return [&, all = Lines<R>(site, false), gains = std::vector<R>(n * CHUNK)](Index chunk) mutable {
            const Index begin = chunk * CHUNK, length = std::min(CHUNK, dim - begin);
            site.load_gain(begin, length, gains.data());
            const R* weights = small.data();
            R* rows = in_map + begin;
            for (const auto& head : site.heads) {
                const Index inner = head->inner, members = head->members;
                const R* line = all.load(*head, weights + head->num_weights(), begin, length);
                for (Index g = 0; g < head->groups; ++g, line += inner * CHUNK) {
                    each_mixed(weights, inner, 1, line, inner, members, length, [&](Index m, Index d, auto value) {
                        const R* gain = &gains[(g * members + m) % n * CHUNK + d];
                        store(rows + m * dim + d, value * load<decltype(value)>(gain));
                    });
                    weights += members * inner, rows += members * dim;
                }
                weights += head->num_core();
            }
        };
    });
}

template <class R>
void fold_backward(const Index* form, int threads, const R* const* tensors, const R* d_in, const R* d_out,
                   const R* d_bias, R* const* slopes) {
    const Site<R> site(form, tensors, slopes);
    const Index n = site.n, dim = site.dim, part = site.num_small() + n;
    const std::vector<R> small = site.all_small();
    std::vector<R> parts(site.chunks() * part);
    over(site.chunks(), threads, [&] {
        return [&, all = Lines<R>(site, true), gains = std::vector<R>(n * CHUNK), d_gains = std::vector<R>(n * CHUNK),
                gradient = std::vector<R>(site.most([](const Stored<R>& head) { return head.members; }) * CHUNK)](
                   Index chunk) mutable {
            const Index begin = chunk * CHUNK, length = std::min(CHUNK, dim - begin);
            site.load_gain(begin, length, gains.data());
            std::fill(d_gains.begin(), d_gains.end(), R(0));
            const R *weights = small.data(), *rows = d_in + begin;
            R* d_weights = parts.data() + chunk * part;
            for (const auto& head : site.heads) {
                const Index inner = head->inner, members = head->members;
                const R *core = weights + head->num_weights(), *line = all.load(*head, core, begin, length);
                R *d_core = d_weights + head->num_weights(), *d_line = all.d_lines.data();
                for (Index g = 0; g < head->groups; ++g, line += inner * CHUNK, d_line += inner * CHUNK) {
                    each_mixed(weights, inner, 1, line, inner, members, length, [&](Index m, Index d, auto value) {
                        using V = decltype(value);
                        const Index at = (g * members + m) % n * CHUNK + d;
                        const V slope = load<V>(rows + m * dim + d);
                        store(&d_gains[at], load<V>(&d_gains[at]) + slope * value);
                        store(&gradient[m * CHUNK + d], slope * load<V>(&gains[at]));
                    });
                    dots(gradient.data(), members, CHUNK, line, inner, CHUNK, length, d_weights, inner);
                    mix_rows(weights, 1, inner, gradient.data(), members, inner, length, d_line);
                    weights += members * inner, d_weights += members * inner, rows += members * dim;
                }
                all.vjp(*head, core, begin, length, d_core);
                weights += head->num_core(), d_weights += head->num_core();
            }
            site.save_gain(begin, length, d_gains.data(), d_weights);
        };
    });
    // Chunk after chunk, in their order.
    std::vector<R> sums(part);
    for (Index chunk = 0; chunk < site.chunks(); ++chunk)
        for (Index e = 0; e < part; ++e) sums[e] += parts[chunk * part + e];
    const R* d_weights = sums.data();
    for (const auto& head : site.heads) {
        const Index last = head->tensors, count = head->rows * head->logits;
        R d_gate{};
        if (head->direct) {
            for (Index e = 0; e < head->num_weights(); ++e) d_gate += d_weights[e];
        } else {
            std::vector<R> map(count);
            head->out(map.data());
            for (Index e = 0; e < count; ++e) d_gate += d_out[e] * map[e];
            for (Index e = 0; e < count; ++e) map[e] = d_out[e] * head->gate();
            head->vjp_out(map.data());
            head->vjp_weights(d_weights);
            head->vjp_core(d_weights + head->num_weights());
            d_out += count;
        }
        *head->slopes[last] = d_gate;
        std::copy_n(d_bias, head->logits, head->slopes[last + 1]);
        d_bias += head->logits, d_weights += head->num_weights() + head->num_core();
    }
    if (site.gain == RANK_ONE) std::copy_n(d_weights, n, slopes[0]);
}

}  // namespace temper
