// Vectors of eight numbers, and how streams are loaded into them.
//
// Two uses: eight neighbouring features of one token (the passes over streams), or the same number
// of eight tokens (routing, where every lane is a token). GCC's vector types, so that one source serves every CPU.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

namespace temper {

constexpr int LANES = 8;
using Index = std::int64_t;

template <class Real, int count>
struct PackOf {
    typedef Real type __attribute__((vector_size(count * sizeof(Real))));
};
template <class Real>
using Pack = typename PackOf<Real, LANES>::type;
// Neighbouring features of one token: as many as a register holds, where that is more.
#if defined(__AVX512F__)
constexpr bool MANY_REGISTERS = true;
template <class Real>
using Wide = typename PackOf<Real, sizeof(Real) == 4 ? 2 * LANES : LANES>::type;
#else
constexpr bool MANY_REGISTERS = false;
template <class Real>
using Wide = Pack<Real>;
#endif

typedef std::int32_t Int8 __attribute__((vector_size(32)));
typedef std::uint32_t Word8 __attribute__((vector_size(32)));
typedef std::uint16_t Half8 __attribute__((vector_size(16)));
typedef std::uint32_t Word16 __attribute__((vector_size(64)));
typedef std::uint16_t Half16 __attribute__((vector_size(32)));

struct BFloat16 {
    std::uint16_t bits;
};

// What is stored in S is computed in Real<S>.
template <class S>
struct RealOf {
    typedef S type;
};
template <>
struct RealOf<BFloat16> {
    typedef float type;
};
template <class S>
using Real = typename RealOf<S>::type;

template <class V>
struct Width {
    static constexpr int value = sizeof(V) / sizeof(std::declval<V&>()[0]);
};
template <>
struct Width<float> {
    static constexpr int value = 1;
};
template <>
struct Width<double> {
    static constexpr int value = 1;
};

// One number in every lane. Minus zero changes nothing, so nothing is computed; plus zero would make a zero of -0.
template <class V>
inline V same(double value) {
    if constexpr (Width<V>::value == 1)
        return V(value);
    else
        return std::remove_reference_t<decltype(std::declval<V&>()[0])>(value) - V{};
}

// V is a Pack, or a single number for what is left of a row.
template <class V>
inline V load(const float* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
template <class V>
inline V load(const double* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
template <class V>
inline V load(const BFloat16* p);
template <class V, class Word, class Half>
inline V widened(const BFloat16* p) {
    Half half;
    std::memcpy(&half, p, sizeof half);
    Word word = __builtin_convertvector(half, Word) << 16;
    V v;
    std::memcpy(&v, &word, sizeof v);
    return v;
}
template <>
inline Pack<float> load<Pack<float>>(const BFloat16* p) {
    return widened<Pack<float>, Word8, Half8>(p);
}
#if defined(__AVX512F__)
template <>
inline Wide<float> load<Wide<float>>(const BFloat16* p) {
    return widened<Wide<float>, Word16, Half16>(p);
}
#endif
template <>
inline float load<float>(const BFloat16* p) {
    std::uint32_t word = std::uint32_t(p->bits) << 16;
    float v;
    std::memcpy(&v, &word, sizeof v);
    return v;
}

template <class V>
inline void store(float* p, V v) {
    std::memcpy(p, &v, sizeof v);
}
template <class V>
inline void store(double* p, V v) {
    std::memcpy(p, &v, sizeof v);
}
// To the nearest, ties to even; what is not a number stays so.
template <class Word, class Half, class V>
inline void store_rounded(BFloat16* p, V v) {
    Word word;
    std::memcpy(&word, &v, sizeof word);
    Word rounded = (word + 0x7fffu + ((word >> 16) & 1u)) >> 16;
    Half half = __builtin_convertvector(v == v ? rounded : Word{} + 0x7fc0u, Half);
    std::memcpy(p, &half, sizeof half);
}
inline void store(BFloat16* p, Pack<float> v) { store_rounded<Word8, Half8>(p, v); }
#if defined(__AVX512F__)
inline void store(BFloat16* p, Wide<float> v) { store_rounded<Word16, Half16>(p, v); }
#endif
inline void store(BFloat16* p, float v) {
    std::uint32_t word;
    std::memcpy(&word, &v, sizeof word);
    p->bits = v == v ? std::uint16_t((word + 0x7fffu + ((word >> 16) & 1u)) >> 16) : std::uint16_t(0x7fc0u);
}

// Keeps a vector that is used several times in a register: left alone, GCC loads it again for every use. By value: a
// reference to an entry of an array would be written back to the array, in memory.
template <class V>
inline V in_register(V v) {
#if defined(__AVX512F__)
    if constexpr (sizeof(V) <= 64) asm("" : "+v"(v));
#elif defined(__AVX__)
    if constexpr (sizeof(V) <= 32) asm("" : "+x"(v));
#endif
    return v;
}

inline float total(float v) { return v; }
inline double total(double v) { return v; }
// Half by half, so that the first additions are of vectors.
template <class V>
inline auto total(V v) {
    using R = std::remove_reference_t<decltype(std::declval<V&>()[0])>;
    typename PackOf<R, Width<V>::value / 2>::type low, high;
    std::memcpy(&low, &v, sizeof(low));
    std::memcpy(&high, reinterpret_cast<const char*>(&v) + sizeof(low), sizeof(high));
    low += high;
    if constexpr (Width<V>::value > LANES)
        return total(low);
    else
        return (low[0] + low[2]) + (low[1] + low[3]);
}

// Lane k of vector i becomes lane i of vector k: one bit of both numbers after the other changes places.
#if defined(__clang__) || __GNUC__ >= 12
constexpr bool CAN_TRANSPOSE = true;
template <int bit, class V, int... K>
inline void swap_bit(V& first, V& second, std::integer_sequence<int, K...>) {
    V low = __builtin_shufflevector(first, second, (K & bit ? LANES + (K ^ bit) : K)...);
    second = __builtin_shufflevector(first, second, (K & bit ? LANES + K : K ^ bit)...);
    first = low;
}
template <int bit, class V>
inline void swap_bits(V (&v)[LANES]) {
    for (int i = 0; i < LANES; ++i)
        if (!(i & bit)) swap_bit<bit>(v[i], v[i | bit], std::make_integer_sequence<int, LANES>{});
}
template <class V>
inline void transpose(V (&v)[LANES]) {
    swap_bits<1>(v), swap_bits<2>(v), swap_bits<4>(v);
}
#else
constexpr bool CAN_TRANSPOSE = false;
template <class V>
inline void transpose(V (&)[LANES]) {}
#endif

// Elementary functions of eight tokens at once.
inline Pack<float> exp(Pack<float> x) {
    const Pack<float> magic = same<Pack<float>>(12582912.0f);
    Pack<float> least = same<Pack<float>>(-87.3f), most = same<Pack<float>>(88.3f);
    Pack<float> inside = x < least ? least : (x > most ? most : x);
    Pack<float> power = (inside * 1.44269504f + magic) - magic;
    // ln 2 in two parts: the first has few digits, so that its product with the power is exact.
    Pack<float> r = (inside - power * 0.693359375f) - power * -2.12194440e-4f;
    Pack<float> sum = same<Pack<float>>(1.0f / 5040);
    sum = sum * r + 1.0f / 720;
    sum = sum * r + 1.0f / 120;
    sum = sum * r + 1.0f / 24;
    sum = sum * r + 1.0f / 6;
    sum = sum * r + 0.5f;
    sum = sum * r + 1.0f;
    sum = sum * r + 1.0f;
    Int8 bits = (__builtin_convertvector(power, Int8) + 127) << 23;
    Pack<float> scale;
    std::memcpy(&scale, &bits, sizeof scale);
    Pack<float> result = x < least ? Pack<float>{} : sum * scale;
    return x == x ? result : x;
}
inline Pack<float> log(Pack<float> x) {
    Int8 bits;
    std::memcpy(&bits, &x, sizeof bits);
    Int8 power = ((bits - 0x3f3504f3) >> 23);
    Int8 mantissa_bits = bits - (power << 23);
    Pack<float> m;
    std::memcpy(&m, &mantissa_bits, sizeof m);
    // log m = 2 artanh((m - 1) / (m + 1)) with m between the roots of 1/2 and 2.
    Pack<float> s = (m - 1.0f) / (m + 1.0f), q = s * s;
    Pack<float> sum = same<Pack<float>>(2.0f / 9);
    sum = sum * q + 2.0f / 7;
    sum = sum * q + 2.0f / 5;
    sum = sum * q + 2.0f / 3;
    sum = sum * q + 2.0f;
    Pack<float> n = __builtin_convertvector(power, Pack<float>);
    return (sum * s + n * -2.12194440e-4f) + n * 0.693359375f;
}
inline Pack<double> exp(Pack<double> x) {
    for (int k = 0; k < LANES; ++k) x[k] = std::exp(x[k]);
    return x;
}
inline Pack<double> log(Pack<double> x) {
    for (int k = 0; k < LANES; ++k) x[k] = std::log(x[k]);
    return x;
}
template <class V>
inline V max(V a, V b) {
    return a > b ? a : b;
}
template <class V>
inline V min(V a, V b) {
    return a < b ? a : b;
}
template <class V>
inline V abs(V a) {
    return a < V{} ? -a : a;
}
template <class V>
inline V sigmoid(V x) {
    return same<V>(1) / (exp(-x) + 1);
}
template <class M>
inline bool any(M mask) {
    for (int k = 0; k < LANES; ++k)
        if (mask[k]) return true;
    return false;
}

}  // namespace temper
