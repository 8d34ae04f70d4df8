// What the kernels are told about a site; `temper.ops.operators` has the same fields in the same order.
#pragma once

#include <cstdint>

namespace temper {

constexpr int MAX_STREAMS = 64;

enum MixerCode : std::int64_t { COPY, SINKHORN, GUARDED, NEWTON, PERMUTATIONS };

struct Plan {
    std::int64_t streams, dim;
    // Bottleneck rows of pre, res and post, and the number of logits of res.
    std::int64_t rows[3], logits;
    // Whether the bottleneck of a head is its logits: no output map.
    std::int64_t direct[3];
    std::int64_t clamp;
    std::int64_t mixer, iters, last_columns, num_factors;
    const std::int64_t* factors;
    const std::uint8_t* tables;
    double norm_eps, pre_eps, tol, eps;
};

}  // namespace temper
