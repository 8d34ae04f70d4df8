// Logits to res and back, for eight tokens at once: every number here is a lane vector.
//
// Letters: N streams; K = exp(logits); u, v the scaling vectors of Sinkhorn, P = u K v.
#pragma once

#include <limits>
#include <memory>
#include <vector>

#include "lanes.h"
#include "plan.h"

namespace temper {

// The matrix seen with the axis that is normalised last as its rows, so that rows and columns are one code.
struct View {
    int n;
    bool turned;
    int at(int i, int j) const { return turned ? j * n + i : i * n + j; }
};

// Beyond this spread of logits the scaling vectors would leave the range of the numbers.
template <class Real>
constexpr Real widest() {
    return sizeof(Real) == 4 ? Real(40) : Real(300);
}

// Logits of eight tokens to res, and the gradient back.
template <class Real>
struct Mixer {
    using V = Pack<Real>;
    virtual ~Mixer() = default;
    virtual void forward(const V* logits, V* res) = 0;
    virtual void backward(const V* logits, const V* res, const V* grad, V* out) = 0;
};

// ROWS sums at once, so that none waits for the one before it: sums[r] = sum_j kernel[r, j] x[j].
template <int ROWS, class V>
inline void along(const V* kernel, int n, const V* x, V* sums) {
    V sum[ROWS] = {};
    for (int j = 0; j < n; ++j)
        for (int r = 0; r < ROWS; ++r) sum[r] += kernel[r * n + j] * x[j];
    for (int r = 0; r < ROWS; ++r) sums[r] = sum[r];
}

// sums[j] += sum_r kernel[r, j] x[r] over ROWS rows.
template <int ROWS, class V>
inline void across(const V* kernel, int n, const V* x, V* sums) {
    for (int j = 0; j < n; ++j) {
        V sum = sums[j];
        for (int r = 0; r < ROWS; ++r) sum += kernel[r * n + j] * x[r];
        sums[j] = sum;
    }
}

// Calls f with the first row of every block and its number of rows, which is known when this is compiled.
template <class F>
inline void by_blocks(int n, F f) {
    int i = 0;
    for (; i + 8 <= n; i += 8) f(i, std::integral_constant<int, 8>{});
    if (i + 4 <= n) f(i, std::integral_constant<int, 4>{}), i += 4;
    for (; i < n; ++i) f(i, std::integral_constant<int, 1>{});
}

// SIZE is the number of streams where it is a usual one, so that loops over it are written out; 0 elsewhere.
template <class Real, int SIZE>
class Sinkhorn final : public Mixer<Real> {
    using V = Pack<Real>;
    using Mask = decltype(V{} < V{});

   public:
    Sinkhorn(const Plan& plan)
        : streams(int(plan.streams)),
          iters(int(plan.iters)),
          tol(Real(plan.tol)),
          view{int(plan.streams), plan.last_columns != 0},
          kernel(streams * streams),
          value(streams * streams),
          carry(streams * streams),
          rows((iters + 1) * streams),
          columns((iters + 1) * streams),
          row_slopes((iters + 1) * streams),
          column_slopes((iters + 1) * streams),
          open(iters + 1) {}

    void forward(const V* logits, V* res) override {
        const int n = SIZE ? SIZE : streams;
        if (Mask wide = scale(logits); any(wide)) {
            scaled(res);
            by_logs(logits);
            for (int i = 0; i < n; ++i)
                for (int j = 0; j < n; ++j) {
                    V& entry = res[view.at(i, j)];
                    entry = wide ? exp(value[i * n + j]) : entry;
                }
        } else {
            scaled(res);
        }
    }

    // In logit space a normalisation takes P times the sum of the gradient from the gradient, and what it takes is
    // the kernel times a product of two vectors. Only their sums lead to the round before, so the sweep is products of
    // the kernel with vectors, as in the forward, and the matrix is put together at the end. The last normalisation of
    // rows is done entry by entry: there numbers as large as the gradient cancel.
    void backward(const V* logits, const V*, const V* grad, V* out) override {
        const int n = SIZE ? SIZE : streams;
        Mask wide = scale(logits);
        V left[MAX_STREAMS], down[MAX_STREAMS] = {}, sums[MAX_STREAMS];
        for (int i = 0; i < n; ++i) {
            V sum{};
            for (int j = 0; j < n; ++j) {
                V p = carry[i * n + j] = kernel[i * n + j] * rows[iters * n + i] * columns[iters * n + j];
                sum += p * grad[view.at(i, j)];
            }
            V taken = open[iters] ? sum : V{};
            left[i] = sum - taken;
            for (int j = 0; j < n; ++j) down[j] += carry[i * n + j] *= grad[view.at(i, j)] - taken;
        }
        for (int k = iters; k > 0; --k) {
            const V *u = &rows[k * n], *before = &rows[(k - 1) * n], *v = &columns[k * n];
            V *row_slope = &row_slopes[k * n], *column_slope = &column_slopes[k * n];
            for (int j = 0; j < n; ++j) sums[j] = row_slope[j] = V{};
            if (k < iters) {
                for (int i = 0; i < n; ++i) {
                    V taken = open[k] ? left[i] : V{};
                    row_slope[i] = taken * u[i];
                    left[i] -= taken;
                }
                by_blocks(n, [&](int i, auto count) { across<count>(&kernel[i * n], n, &row_slope[i], sums); });
            }
            for (int j = 0; j < n; ++j) {
                down[j] -= sums[j] * v[j];
                V taken = open[k] ? down[j] : V{};
                column_slope[j] = taken * v[j];
                down[j] -= taken;
            }
            by_blocks(n, [&](int i, auto count) { along<count>(&kernel[i * n], n, column_slope, &sums[i]); });
            for (int i = 0; i < n; ++i) left[i] -= sums[i] * before[i];
        }
        by_blocks(n, [&](int i, auto count) { gather<count>(i, out); });
        if (any(wide)) {
            by_logs(logits);
            back_by_logs(grad);
            for (int i = 0; i < n; ++i)
                for (int j = 0; j < n; ++j) {
                    V& entry = out[view.at(i, j)];
                    entry = wide ? carry[i * n + j] : entry;
                }
        }
    }

   private:
    // Rows i, i + 1, .. of the gradient from what every round took.
    template <int ROWS>
    void gather(int i, V* out) {
        const int n = SIZE ? SIZE : streams;
        for (int j = 0; j < n; ++j) {
            V sum[ROWS] = {};
            for (int k = 1; k <= iters; ++k) {
                V v = columns[k * n + j], slope = column_slopes[k * n + j];
                for (int r = 0; r < ROWS; ++r)
                    sum[r] += row_slopes[k * n + i + r] * v + rows[(k - 1) * n + i + r] * slope;
            }
            for (int r = 0; r < ROWS; ++r) {
                int entry = (i + r) * n + j;
                out[view.at(i + r, j)] = carry[entry] - kernel[entry] * sum[r];
            }
        }
    }

    // Fills the kernel and the scaling vectors of every round; says which tokens need logarithms.
    Mask scale(const V* logits) {
        const int n = SIZE ? SIZE : streams;
        V spread{};
        for (int j = 0; j < n; ++j) {
            V top = logits[view.at(0, j)];
            for (int i = 1; i < n; ++i) top = max(top, logits[view.at(i, j)]);
            for (int i = 0; i < n; ++i) {
                // The column's own maximum cancels in the first normalisation.
                V shifted = logits[view.at(i, j)] - top;
                spread = min(spread, shifted);
                kernel[i * n + j] = exp(shifted);
            }
        }
        V sums[MAX_STREAMS];
        for (int j = 0; j < n; ++j) {
            rows[j] = columns[j] = same<V>(1);
            sums[j] = kernel[j];
            for (int i = 1; i < n; ++i) sums[j] += kernel[i * n + j];
        }
        open[1] = V{} == V{};
        for (int k = 1; k <= iters; ++k) {
            V *before = &rows[(k - 1) * n], *u = &rows[k * n], *v = &columns[k * n], *old = &columns[(k - 1) * n];
            if (k > 1) {
                open[k] = open[k - 1];
                if (tol > 0) {
                    V error{};
                    for (int j = 0; j < n; ++j) error = max(error, abs(sums[j] * old[j] - 1));
                    open[k] &= error > same<V>(tol);
                }
            }
            for (int j = 0; j < n; ++j) {
                v[j] = open[k] ? same<V>(1) / sums[j] : old[j];
                sums[j] = V{};
            }
            // The column sums of the next round are taken as soon as some rows are known.
            by_blocks(n, [&](int i, auto count) {
                along<count>(&kernel[i * n], n, v, &u[i]);
                for (int r = i; r < i + count; ++r) u[r] = open[k] ? same<V>(1) / u[r] : before[r];
                across<count>(&kernel[i * n], n, &u[i], sums);
            });
        }
        return spread < same<V>(-widest<Real>());
    }

    void scaled(V* res) {
        const int n = SIZE ? SIZE : streams;
        for (int i = 0; i < n; ++i)
            for (int j = 0; j < n; ++j)
                res[view.at(i, j)] = kernel[i * n + j] * rows[iters * n + i] * columns[iters * n + j];
    }

    // The same rounds on logarithms; rows and columns hold what each normalisation took away.
    void by_logs(const V* logits) {
        const int n = SIZE ? SIZE : streams;
        for (int i = 0; i < n; ++i)
            for (int j = 0; j < n; ++j) value[i * n + j] = logits[view.at(i, j)];
        open[1] = V{} == V{};
        for (int k = 1; k <= iters; ++k) {
            V sums[MAX_STREAMS];
            for (int j = 0; j < n; ++j) {
                V top = value[j];
                for (int i = 1; i < n; ++i) top = max(top, value[i * n + j]);
                V sum{};
                for (int i = 0; i < n; ++i) sum += exp(value[i * n + j] - top);
                sums[j] = top + log(sum);
            }
            if (k > 1) {
                open[k] = open[k - 1];
                if (tol > 0) {
                    V error{};
                    for (int j = 0; j < n; ++j) error = max(error, abs(exp(sums[j]) - 1));
                    open[k] &= error > same<V>(tol);
                }
            }
            for (int j = 0; j < n; ++j) {
                columns[k * n + j] = open[k] ? sums[j] : V{};
                for (int i = 0; i < n; ++i) value[i * n + j] -= columns[k * n + j];
            }
            for (int i = 0; i < n; ++i) {
                V top = value[i * n];
                for (int j = 1; j < n; ++j) top = max(top, value[i * n + j]);
                V sum{};
                for (int j = 0; j < n; ++j) sum += exp(value[i * n + j] - top);
                rows[k * n + i] = open[k] ? top + log(sum) : V{};
                for (int j = 0; j < n; ++j) value[i * n + j] -= rows[k * n + i];
            }
        }
    }

    void back_by_logs(const V* grad) {
        const int n = SIZE ? SIZE : streams;
        for (int i = 0; i < n; ++i)
            for (int j = 0; j < n; ++j) carry[i * n + j] = exp(value[i * n + j]) * grad[view.at(i, j)];
        for (int k = iters; k > 0; --k) {
            for (int i = 0; i < n; ++i) {
                V sum{};
                for (int j = 0; j < n; ++j) sum += carry[i * n + j];
                sum = open[k] ? sum : V{};
                for (int j = 0; j < n; ++j) {
                    carry[i * n + j] -= exp(value[i * n + j]) * sum;
                    value[i * n + j] += rows[k * n + i];
                }
            }
            for (int j = 0; j < n; ++j) {
                V sum{};
                for (int i = 0; i < n; ++i) sum += carry[i * n + j];
                sum = open[k] ? sum : V{};
                for (int i = 0; i < n; ++i) {
                    carry[i * n + j] -= exp(value[i * n + j]) * sum;
                    value[i * n + j] += columns[k * n + j];
                }
            }
        }
    }

    int streams, iters;
    Real tol;
    View view;
    std::vector<V> kernel, value, carry, rows, columns, row_slopes, column_slopes;
    std::vector<Mask> open;
};

// DeepSeek-V4's form: softmax + eps, and eps in every sum that is divided by.
template <class Real>
class Guarded final : public Mixer<Real> {
    using V = Pack<Real>;

   public:
    Guarded(const Plan& plan)
        : n(int(plan.streams)),
          iters(int(plan.iters)),
          eps(Real(plan.eps)),
          view{int(plan.streams), plan.last_columns != 0},
          start(n * n),
          value(n * n),
          carry(n * n),
          rows(iters * n),
          columns(iters * n) {}

    void forward(const V* logits, V* res) override {
        run(logits);
        for (int i = 0; i < n; ++i)
            for (int j = 0; j < n; ++j) res[view.at(i, j)] = value[i * n + j];
    }

    void backward(const V* logits, const V*, const V* grad, V* out) override {
        run(logits);
        for (int i = 0; i < n; ++i)
            for (int j = 0; j < n; ++j) carry[i * n + j] = grad[view.at(i, j)];
        for (int k = iters - 1; k >= 0; --k) {
            for (int i = 0; i < n; ++i) undo(&value[i * n], &carry[i * n], 1, rows[k * n + i]);
            if (k)
                for (int j = 0; j < n; ++j) undo(&value[j], &carry[j], n, columns[k * n + j]);
        }
        for (int j = 0; j < n; ++j) {
            V slope{};
            for (int i = 0; i < n; ++i) slope += carry[i * n + j] * start[i * n + j];
            for (int i = 0; i < n; ++i) out[view.at(i, j)] = start[i * n + j] * (carry[i * n + j] - slope);
        }
    }

   private:
    void run(const V* logits) {
        for (int j = 0; j < n; ++j) {
            V top = logits[view.at(0, j)], sum{};
            for (int i = 1; i < n; ++i) top = max(top, logits[view.at(i, j)]);
            for (int i = 0; i < n; ++i) sum += start[i * n + j] = exp(logits[view.at(i, j)] - top);
            for (int i = 0; i < n; ++i) {
                start[i * n + j] /= sum;
                value[i * n + j] = start[i * n + j] + eps;
            }
        }
        for (int k = 0; k < iters; ++k) {
            if (k)
                for (int j = 0; j < n; ++j) columns[k * n + j] = divide(&value[j], n);
            for (int i = 0; i < n; ++i) rows[k * n + i] = divide(&value[i * n], 1);
        }
    }

    V divide(V* line, int stride) {
        V sum = same<V>(eps);
        for (int k = 0; k < n; ++k) sum += line[k * stride];
        V inverse = same<V>(1) / sum;
        for (int k = 0; k < n; ++k) line[k * stride] *= inverse;
        return sum;
    }

    void undo(V* line, V* slope, int stride, V sum) {
        V mean{}, inverse = same<V>(1) / sum;
        for (int k = 0; k < n; ++k) mean += slope[k * stride] * line[k * stride];
        for (int k = 0; k < n; ++k) {
            slope[k * stride] = (slope[k * stride] - mean) * inverse;
            line[k * stride] *= sum;
        }
    }

    int n, iters;
    Real eps;
    View view;
    std::vector<V> start, value, carry, rows, columns;
};

// Sinkhorn's limit by Newton's method on the dual, with rows kept exact: P = rowsoftmax(logits + shift).
template <class Real>
class Newton final : public Mixer<Real> {
    using V = Pack<Real>;

   public:
    Newton(const Plan& plan)
        : n(int(plan.streams)),
          iters(int(plan.iters)),
          tol(plan.tol > 0        ? Real(plan.tol)
              : sizeof(Real) == 4 ? Real(2e-6)
                                  : Real(1e-12)),
          view{int(plan.streams), plan.last_columns != 0},
          logit(n * n),
          value(n * n),
          weight(n * n) {}

    void forward(const V* logits, V* res) override {
        V shift[MAX_STREAMS], trial[MAX_STREAMS], sums[MAX_STREAMS], slope[MAX_STREAMS], step[MAX_STREAMS], largest{};
        for (int j = 0; j < n; ++j) {
            V top = logits[view.at(0, j)], sum{};
            for (int i = 1; i < n; ++i) top = max(top, logits[view.at(i, j)]);
            for (int i = 0; i < n; ++i) {
                logit[i * n + j] = logits[view.at(i, j)];
                largest = max(largest, abs(logit[i * n + j]));
                sum += exp(logit[i * n + j] - top);
            }
            shift[j] = -(top + log(sum));
        }
        V height = look(shift, sums);
        for (int k = 0; k < WARM_UP; ++k) {
            plain(shift, sums);
            height = look(shift, sums);
        }
        V error = worst(sums);
        for (int k = 0; k < iters && any(error > same<V>(tol)); ++k) {
            for (int j = 0; j < n; ++j) slope[j] = same<V>(1) - sums[j];
            gram();
            solve(slope, step);
            V mean{}, reach{};
            for (int j = 0; j < n; ++j) mean += step[j];
            mean /= same<V>(Real(n));
            for (int j = 0; j < n; ++j) reach = max(reach, abs(step[j] - mean));
            V short_of = min(same<V>(1), same<V>(LONGEST) / max(reach, same<V>(Real(1e-30))));
            for (int j = 0; j < n; ++j) trial[j] = shift[j] + (step[j] - mean) * short_of;
            V new_sums[MAX_STREAMS];
            V new_height = look(trial, new_sums), new_error = worst(new_sums);
            auto done = error <= same<V>(tol);
            // Newton's step stands where it goes down, as Sinkhorn's always does: measured by the error alone, the two
            // could go round in circles. Near the end the way down is lost in the rounding of its height.
            V size = largest;
            for (int j = 0; j < n; ++j) size += abs(shift[j]);
            V rounding = size * same<V>(4 * std::numeric_limits<Real>::epsilon());
            auto better = (new_height < height) | ((new_error < error) & (new_height < height + rounding));
            V turn[MAX_STREAMS];
            for (int j = 0; j < n; ++j) turn[j] = shift[j];
            plain(turn, sums);
            for (int j = 0; j < n; ++j) shift[j] = done ? shift[j] : (better ? trial[j] : turn[j]);
            height = look(shift, sums);
            error = worst(sums);
        }
        for (int i = 0; i < n; ++i)
            for (int j = 0; j < n; ++j) res[view.at(i, j)] = value[i * n + j];
    }

    // The implicit function theorem: one Laplacian system, whatever the number of steps was.
    void backward(const V*, const V* res, const V* grad, V* out) override {
        V left[MAX_STREAMS], right[MAX_STREAMS], slope[MAX_STREAMS], step[MAX_STREAMS];
        for (int j = 0; j < n; ++j) right[j] = V{};
        for (int i = 0; i < n; ++i) {
            left[i] = V{};
            for (int j = 0; j < n; ++j) {
                V p = value[i * n + j] = res[view.at(i, j)];
                V part = p * grad[view.at(i, j)];
                left[i] += part;
                right[j] += part;
            }
        }
        for (int j = 0; j < n; ++j) {
            slope[j] = -right[j];
            for (int i = 0; i < n; ++i) slope[j] += value[i * n + j] * left[i];
        }
        gram();
        solve(slope, step);
        for (int i = 0; i < n; ++i) {
            V level = left[i];
            for (int j = 0; j < n; ++j) level += value[i * n + j] * step[j];
            for (int j = 0; j < n; ++j) {
                int k = view.at(i, j);
                out[k] = value[i * n + j] * (grad[k] - level + step[j]);
            }
        }
    }

   private:
    static constexpr int WARM_UP = 4;
    // A softmax is flat far away, where Newton's steps would overshoot.
    static constexpr Real LONGEST = 4;

    // P at the shift, its column sums, and the dual objective there.
    V look(const V* shift, V* sums) {
        V height{};
        for (int j = 0; j < n; ++j) {
            sums[j] = V{};
            height -= shift[j];
        }
        for (int i = 0; i < n; ++i) {
            V* line = &value[i * n];
            V top = logit[i * n] + shift[0], sum{};
            for (int j = 1; j < n; ++j) top = max(top, logit[i * n + j] + shift[j]);
            for (int j = 0; j < n; ++j) sum += line[j] = exp(logit[i * n + j] + shift[j] - top);
            V inverse = same<V>(1) / sum;
            for (int j = 0; j < n; ++j) sums[j] += line[j] *= inverse;
            height += top + log(sum);
        }
        return height;
    }

    V worst(const V* sums) const {
        V error{};
        for (int j = 0; j < n; ++j) error = max(error, abs(sums[j] - 1));
        return error;
    }

    void plain(V* shift, const V* sums) const {
        for (int j = 0; j < n; ++j) shift[j] -= log(max(sums[j], same<V>(Real(1e-30))));
    }

    // The weights of the graph whose Laplacian is the Hessian: P^T P off the diagonal.
    void gram() {
        for (int j = 0; j < n; ++j)
            for (int k = 0; k < j; ++k) {
                V sum{};
                for (int i = 0; i < n; ++i) sum += value[i * n + j] * value[i * n + k];
                weight[j * n + k] = sum;
            }
    }

    // Laplacian x = slope by elimination of one node after another. Nothing is ever subtracted from a weight, so
    // entries keep their digits even where P is nearly a permutation and the Laplacian nearly zero.
    void solve(V* slope, V* x) {
        V inverse[MAX_STREAMS];
        for (int k = n - 1; k > 0; --k) {
            V* line = &weight[k * n];
            V pivot{};
            for (int j = 0; j < k; ++j) pivot += line[j];
            inverse[k] = same<V>(1) / max(pivot, same<V>(Real(1e-30)));
            for (int j = 0; j < k; ++j) {
                V share = line[j] * inverse[k];
                slope[j] += share * slope[k];
                for (int i = 0; i < j; ++i) weight[j * n + i] += share * line[i];
            }
        }
        x[0] = V{};
        for (int k = 1; k < n; ++k) {
            V sum = slope[k];
            for (int j = 0; j < k; ++j) sum += weight[k * n + j] * x[j];
            x[k] = sum * inverse[k];
        }
    }

    int n, iters;
    Real tol;
    View view;
    std::vector<V> logit, value, weight;
};

// res = U_K (x) .. (x) U_1, each U a softmax-weighted sum of permutation matrices.
template <class Real>
class Permutations final : public Mixer<Real> {
    using V = Pack<Real>;

   public:
    Permutations(const Plan& plan) : num_factors(int(plan.num_factors)), sizes(plan.factors), tables(plan.tables) {
        Index logits = 0, square = 0, product = 0, size = 1;
        for (int k = 0; k < num_factors; ++k) {
            Index factorial = 1;
            for (Index i = 2; i <= sizes[k]; ++i) factorial *= i;
            counts.push_back(factorial);
            logits += factorial;
            square += sizes[k] * sizes[k];
            size *= sizes[k];
            product += size * size;
        }
        weights.resize(logits);
        factors.resize(square);
        products.resize(product);
        slopes.resize(size * size);
        next.resize(size * size);
    }

    void forward(const V* logits, V* res) override {
        V *weight = weights.data(), *factor = factors.data(), *product = products.data(), *before = nullptr;
        const std::uint8_t* table = tables;
        Index size = 1;
        for (int k = 0; k < num_factors; ++k) {
            Index s = sizes[k];
            V top = logits[0], sum{};
            for (Index p = 1; p < counts[k]; ++p) top = max(top, logits[p]);
            for (Index p = 0; p < counts[k]; ++p) sum += weight[p] = exp(logits[p] - top);
            for (Index e = 0; e < s * s; ++e) factor[e] = V{};
            for (Index p = 0; p < counts[k]; ++p) {
                weight[p] /= sum;
                for (Index i = 0; i < s; ++i) factor[i * s + table[p * s + i]] += weight[p];
            }
            for (Index a = 0; a < s; ++a)
                for (Index i = 0; i < size; ++i)
                    for (Index b = 0; b < s; ++b)
                        for (Index j = 0; j < size; ++j)
                            product[(a * size + i) * s * size + b * size + j] =
                                before ? factor[a * s + b] * before[i * size + j] : factor[a * s + b];
            size *= s;
            before = product;
            logits += counts[k], weight += counts[k], table += counts[k] * s, factor += s * s, product += size * size;
        }
        std::memcpy(res, before, size * size * sizeof(V));
    }

    void backward(const V* logits, const V*, const V* grad, V* out) override {
        V* scratch = next.data();
        forward(logits, scratch);
        Index size = 1;
        for (int k = 0; k < num_factors; ++k) size *= sizes[k];
        for (Index e = 0; e < size * size; ++e) slopes[e] = grad[e];
        V *weight = weights.data() + weights.size(), *factor = factors.data() + factors.size();
        V* product = products.data() + products.size();
        Index num_tables = 0, num_logits = Index(weights.size());
        for (int k = 0; k < num_factors; ++k) num_tables += counts[k] * sizes[k];
        const std::uint8_t* table = tables + num_tables;
        out += num_logits;
        for (int k = num_factors - 1; k >= 0; --k) {
            Index s = sizes[k], inner = size / s;
            weight -= counts[k], out -= counts[k], table -= counts[k] * s, factor -= s * s, product -= size * size;
            const V* before = product - inner * inner;
            V slope[MAX_FACTOR * MAX_FACTOR] = {};
            for (Index e = 0; e < inner * inner; ++e) next[e] = V{};
            for (Index a = 0; a < s; ++a)
                for (Index i = 0; i < inner; ++i)
                    for (Index b = 0; b < s; ++b)
                        for (Index j = 0; j < inner; ++j) {
                            V g = slopes[(a * inner + i) * size + b * inner + j];
                            slope[a * s + b] += k ? g * before[i * inner + j] : g;
                            next[i * inner + j] += g * factor[a * s + b];
                        }
            V mean{};
            for (Index p = 0; p < counts[k]; ++p) {
                V sum{};
                for (Index i = 0; i < s; ++i) sum += slope[i * s + table[p * s + i]];
                out[p] = sum;
                mean += sum * weight[p];
            }
            for (Index p = 0; p < counts[k]; ++p) out[p] = weight[p] * (out[p] - mean);
            for (Index e = 0; e < inner * inner; ++e) slopes[e] = next[e];
            size = inner;
        }
    }

   private:
    static constexpr int MAX_FACTOR = 7;
    int num_factors;
    const Index* sizes;
    const std::uint8_t* tables;
    std::vector<Index> counts;
    std::vector<V> weights, factors, products, slopes, next;
};

template <class Real>
class Copy final : public Mixer<Real> {
    using V = Pack<Real>;

   public:
    Copy(const Plan& plan) : entries(plan.streams * plan.streams) {}
    void forward(const V* logits, V* res) override { std::memcpy(res, logits, entries * sizeof(V)); }
    void backward(const V*, const V*, const V* grad, V* out) override { std::memcpy(out, grad, entries * sizeof(V)); }

   private:
    Index entries;
};

template <class Real>
std::unique_ptr<Mixer<Real>> make_mixer(const Plan& plan) {
    switch (plan.mixer) {
        case SINKHORN:
            switch (plan.streams) {
                case 4: return std::make_unique<Sinkhorn<Real, 4>>(plan);
                case 8: return std::make_unique<Sinkhorn<Real, 8>>(plan);
                default: return std::make_unique<Sinkhorn<Real, 0>>(plan);
            }
        case GUARDED: return std::make_unique<Guarded<Real>>(plan);
        case NEWTON: return std::make_unique<Newton<Real>>(plan);
        case PERMUTATIONS: return std::make_unique<Permutations<Real>>(plan);
        default: return std::make_unique<Copy<Real>>(plan);
    }
}

}  // namespace temper
