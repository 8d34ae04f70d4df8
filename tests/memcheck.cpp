// Runs every kernel of one library on heap buffers that are exactly as large as the interface says; for valgrind.
//     memcheck library.so bytes-of-a-stored-number bytes-of-a-computed-one

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <vector>

#include "plan.h"

using std::int64_t;
using temper::Plan;

namespace {

int stored, computed;
unsigned state = 1;

// Numbers between -1 and 1 in any of the three formats.
void* random(int64_t count, int bytes) {
    char* memory = static_cast<char*>(std::malloc(count * bytes));
    for (int64_t k = 0; k < count; ++k) {
        state = state * 1664525u + 1013904223u;
        double value = double(state >> 8) / (1 << 23) - 1;
        float single = float(value);
        if (bytes == 8) std::memcpy(memory + 8 * k, &value, 8);
        // bfloat16 is the upper half of a float.
        if (bytes <= 4) std::memcpy(memory + bytes * k, reinterpret_cast<char*>(&single) + 4 - bytes, bytes);
    }
    return memory;
}

void* blank(int64_t count, int bytes) { return std::malloc(count * bytes); }

// Reads every byte, so that valgrind sees the ones that nobody wrote.
void expect_written(const void* memory, int64_t bytes) {
    for (int64_t k = 0; k < bytes; ++k)
        if (static_cast<const unsigned char*>(memory)[k] == 255) state ^= 1;
}

template <class... Arguments>
void call(void* library, const char* name, Arguments... arguments) {
    reinterpret_cast<void (*)(Arguments...)>(dlsym(library, name))(arguments...);
}

void run(void* library, Plan plan, int64_t tokens, int project) {
    int64_t n = plan.streams, rows = plan.rows[0] + plan.rows[1] + plan.rows[2], weights = n * n + 2 * n;
    int64_t biases = 2 * n + plan.logits, maps = 0, logits[3] = {n, plan.logits, n}, width = n * plan.dim;
    for (int h = 0; h < 3; ++h) maps += plan.direct[h] ? 0 : plan.rows[h] * logits[h];
    void *streams = random(tokens * width, stored), *y = random(tokens * plan.dim, stored);
    void *in_map = random(rows * width, computed), *out = random(maps, computed), *bias = random(biases, computed);
    void *x = blank(tokens * plan.dim, stored), *weight = blank(tokens * weights, computed);
    void* z = project ? blank(tokens * rows, computed) : random(tokens * rows, computed);
    void* norms = blank(tokens * 2, computed);
    const Plan* p = &plan;
    call(library, "begin", p, tokens, 1, project, streams, in_map, out, bias, x, weight, z, norms);
    expect_written(x, tokens * plan.dim * stored);
    expect_written(weight, tokens * weights * computed);
    void* next = blank(tokens * width, stored);
    call(library, "finish", p, tokens, 1, streams, y, weight, next);
    expect_written(next, tokens * width * stored);
    void *d_y = blank(tokens * plan.dim, stored), *d_weights = blank(tokens * weights, computed);
    call(library, "finish_backward", p, tokens, 1, next, streams, y, weight, d_y, d_weights);
    expect_written(d_y, tokens * plan.dim * stored);
    expect_written(d_weights, tokens * weights * computed);
    void *d_streams = blank(tokens * width, stored), *d_in = blank(rows * width, computed);
    void* d_z = project ? nullptr : blank(tokens * rows, computed);
    void *d_out = blank(maps, computed), *d_bias = blank(biases, computed);
    call(library, "begin_backward", p, tokens, 1, project, next, x, d_weights, streams, in_map, out, bias, weight, z,
         norms, d_streams, d_in, d_z, d_out, d_bias);
    expect_written(d_streams, tokens * width * stored);
    if (project) expect_written(d_in, rows * width * computed);
    if (d_z) expect_written(d_z, tokens * rows * computed);
    expect_written(d_out, maps * computed);
    expect_written(d_bias, biases * computed);
    call(library, "finish", p, tokens, 1, next, y, weight, next);
    for (void* memory : {streams, y, in_map, out, bias, x, weight, z, norms, next, d_y, d_weights, d_streams, d_in, d_z,
                         d_out, d_bias})
        std::free(memory);
}

// All of a fold; `sizes` are the entries of its tensors.
void run_fold(void* library, const std::vector<int64_t>& form, const std::vector<int64_t>& sizes, int64_t in_map,
              int64_t out, int64_t bias) {
    std::vector<void*> tensors, slopes;
    for (int64_t size : sizes) {
        tensors.push_back(random(size, computed));
        slopes.push_back(blank(size, computed));
    }
    void* made[] = {blank(in_map, computed), blank(out, computed), blank(bias, computed)};
    call(library, "fold", form.data(), int64_t(1), tensors.data(), made[0], made[1], made[2]);
    expect_written(made[0], in_map * computed);
    expect_written(made[1], out * computed);
    expect_written(made[2], bias * computed);
    call(library, "fold_backward", form.data(), int64_t(1), tensors.data(), made[0], made[1], made[2], slopes.data());
    for (size_t k = 0; k < sizes.size(); ++k) expect_written(slopes[k], sizes[k] * computed);
    for (const auto& all : {tensors, slopes})
        for (void* memory : all) std::free(memory);
    for (void* memory : made) std::free(memory);
}

}  // namespace

int main(int, char** words) {
    void* library = dlopen(words[1], RTLD_NOW);
    if (!library) return std::puts(dlerror()), 2;
    stored = std::atoi(words[2]), computed = std::atoi(words[3]);
    struct Kind {
        int64_t code, n, iters, last_columns;
        double tol, eps;
        std::vector<int64_t> factors;
    };
    const Kind kinds[] = {
        {temper::COPY, 5, 0, 0, 0, 0, {}},
        {temper::SINKHORN, 3, 3, 0, 0, 0, {}},
        {temper::SINKHORN, 4, 4, 1, 1e-2, 0, {}},
        {temper::GUARDED, 4, 1, 0, 0, 1e-2, {}},
        {temper::GUARDED, 3, 3, 1, 0, 1e-2, {}},
        {temper::NEWTON, 3, 20, 0, 0, 0, {}},
        {temper::NEWTON, 5, 3, 1, 0, 0, {}},
        {temper::PERMUTATIONS, 3, 0, 0, 0, 0, {3}},
        {temper::PERMUTATIONS, 12, 0, 0, 0, 0, {2, 2, 3}},
    };
    for (const Kind& kind : kinds) {
        Plan plan{};
        plan.streams = kind.n, plan.mixer = kind.code, plan.iters = kind.iters, plan.last_columns = kind.last_columns;
        plan.tol = kind.tol, plan.eps = kind.eps, plan.norm_eps = 1e-6;
        std::vector<unsigned char> tables;
        plan.logits = kind.factors.empty() ? kind.n * kind.n : 0;
        for (int64_t size : kind.factors) {
            std::vector<unsigned char> order(size);
            std::iota(order.begin(), order.end(), 0);
            do {
                tables.insert(tables.end(), order.begin(), order.end());
                ++plan.logits;
            } while (std::next_permutation(order.begin(), order.end()));
        }
        plan.num_factors = int64_t(kind.factors.size()), plan.factors = kind.factors.data(),
        plan.tables = tables.data();
        for (int64_t dim : {1, 25}) {
            plan.dim = dim;
            plan.rows[0] = 2, plan.rows[1] = 3, plan.rows[2] = kind.n;
            plan.direct[2] = 1;
            for (int64_t tokens : {1, 10}) run(library, plan, tokens, int(tokens % 2));
        }
        // Two chunks of a reduction.
        if (kind.code == temper::COPY) run(library, plan, 260, 1);
    }
    for (int64_t dim : {1, 25, 270}) {
        const int64_t n = 3;
        // cp of rank 2 with a mode of 3; tucker (2, 2, 2, 1) with modes 3 and 4; tt (2, 2) with a mode of 3; full gain.
        run_fold(
            library, {n, dim, 0, 1, 1, 3, 2, 2, 2, 3, 4, 2, 2, 2, 1, 3, 1, 3, 2, 2},
            {n * dim, n * 2, dim * 2, 3 * 2, 1, 3, 8, n * 2, dim * 2, 3 * 2, 4, 1, 12, n * 2, 2 * dim * 2, 2 * 3, 1, 3},
            (2 + 2 + 2) * n * dim, 2 * 3 + 2 * 12 + 2 * 3, 3 + 12 + 3);
        // Three dense ones with rank-one gain.
        run_fold(library, {n, dim, 1, 0, 1, 3, 0, 2, 3, 3, 0, 1, 3},
                 {n, dim, n * dim * 3, 1, 3, n * dim * 9, 1, 9, n * dim * 3, 1, 3}, 15 * n * dim, 0, 15);
    }
    return 0;
}
