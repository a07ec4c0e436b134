// Block scales: how they are chosen, how words hold four of them, and which lane carries which to a block-scaled MMA.
#pragma once

#include <cstdint>

#include "../ptx/math.cuh"
#include "../ptx/warp.cuh"
#include "narrow.cuh"

namespace tile {

constexpr int mx_block = 32;           // values that share one ue8m0 scale
constexpr int nvfp4_block = 16;        // values that share one ue4m3 scale
constexpr uint32_t ue8m0_nan = 0xff;   // also the scale of a block that holds a NaN or an infinity
constexpr uint32_t ue4m3_nan = 0x7f;   // the same in NVFP4

// How an MX scale follows from the largest magnitude of its block. Source: OCP Microscaling Formats v1.0, 6.3 (floor);
// torchao, ScaleCalculationMode (all four).
enum class ScaleRule { floor, ceil, rceil, even };

// The ue8m0 scale of a block whose largest magnitude is `amax` (NaN if any value is).
//   floor  the exponent of amax less that of the format's largest value
//   ceil   one more where amax is no power of two
//   rceil  the exponent of amax / largest (a product with its reciprocal in f32), rounded up
//   even   as floor, after rounding amax to the format's mantissa, halves up
// Clamped to ue8m0's smallest; NaN where amax, or amax after rounding, is not finite.
template <class Format>
__device__ inline uint32_t mx_scale(float amax, ScaleRule rule) {
    // Without branches: terms that depend on the rule alone are computed once for all blocks.
    const bool rceil = rule == ScaleRule::rceil, even = rule == ScaleRule::even;
    const uint32_t bits = __float_as_uint(amax * (rceil ? 1.0f / Format::largest : 1.0f));   // no sign
    const uint32_t up = rceil || rule == ScaleRule::ceil ? 0x7fffffu : even ? 1u << (22 - Format::mantissa) : 0;
    const uint32_t not_finite = 0x7f800000u - (even ? up : 0);
    int exponent = (bits + up) >> 23;
    if (rceil && bits <= 0x400000u) exponent = 0;   // 2^-127 has no exponent field of its own
    return __float_as_uint(amax) >= not_finite ? ue8m0_nan : max(exponent - (rceil ? 0 : Format::max_exponent), 0);
}

// 1 / 2^(scale - 127), exact; meaningless for ue8m0_nan and 254, which no finite block has.
__device__ inline float ue8m0_reciprocal(uint32_t scale) { return __uint_as_float((254 - scale) << 23); }

// The codes of eight values times 2^(127 - scale).
template <class Format>
__device__ inline Codes<Format::bits> encode_scaled(const float (&values)[8], uint32_t scale) {
    const float factor = Format::unit * ue8m0_reciprocal(scale);
    float scaled[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) scaled[i] = values[i] * factor;
    return Format::encode(scaled);
}

// The product is also exact in bf16 (values that underflow have code 0 either way), which computes two at a time.
template <class Format>
__device__ inline Codes<Format::bits> encode_scaled(const uint32_t (&pairs)[4], uint32_t scale) {
    return Format::encode(pairs, (254 - scale) * 0x00800080u);   // ue8m0_reciprocal as bf16, twice
}

// A divisor for many dividends: correctly rounded f32 division without the subroutine that covers all of f32. Subnormal
// quotients may be rounded twice: all formats here round them to 0.
struct Divisor {
    float divisor, reciprocal, factor;   // of the divisor times a power of two, `factor`

    // For divisors from 2^-90 to 2^120, which are not scaled.
    __device__ static Divisor plain(float divisor) {
        const float reciprocal = ptx::rcp_approx_ftz_f32(divisor);
        return {divisor, fmaf(fmaf(-divisor, reciprocal, 1.0f), reciprocal, reciprocal), 1.0f};
    }

    // For any positive, finite divisor.
    __device__ static Divisor any(float divisor) {
        const float factor = divisor < 0x1p-90f ? 0x1p100f : divisor > 0x1p120f ? 0x1p-64f : 1.0f;
        Divisor result = plain(divisor * factor);
        result.factor = factor;
        return result;
    }

    // The dividend for quotient(): scaled so that its remainder is exact, with quotients clamped to `limit`.
    __device__ float fitted(float value, float limit) const {
        return fmaxf(fminf(value * factor, limit * divisor), -limit * divisor);
    }

    // With a correctly rounded reciprocal one correction by the exact remainder gives the correctly rounded quotient
    // (Markstein, IBM J. Res. Dev. 34, 1990).
    __device__ float quotient(float fitted_value) const {
        const float result = fitted_value * reciprocal;
        // The remainder is negated twice, so that a quotient of -0 stays -0.
        return fmaf(-fmaf(divisor, result, -fitted_value), reciprocal, result);
    }
};

// value / 6, correctly rounded from 2^-60 on, where the remainder is not subnormal.
__device__ inline float plain_sixth(float value) {
    const float quotient = value * (1.0f / 6.0f);
    return fmaf(fmaf(-6.0f, quotient, value), 1.0f / 6.0f, quotient);
}

// amax / 6, correctly rounded, including subnormals.
__device__ inline float sixth(float amax) {
    if (amax < 0x1.8p-124f) {   // the quotient is subnormal: in units of 2^-149 it is an integer division
        const uint32_t units = __float2uint_rn(amax * 0x1p100f * 0x1p49f), quotient = units / 6,
                       rest = units - 6 * quotient;
        return __uint_as_float(quotient + (rest > 3 || (rest == 3 && (quotient & 1))));
    }
    return amax < 0x1p-60f ? plain_sixth(amax * 0x1p64f) * 0x1p-64f : plain_sixth(amax);
}

// NVFP4's global scale, with what all blocks of a thread share.
struct Nvfp4Global {
    float scale;
    Divisor divisor;
    float least, most;   // see plain()

    __device__ explicit Nvfp4Global(float scale) : scale(scale), divisor(Divisor::any(scale)) {
        const bool usual = scale >= 0x1p-56f && scale <= 0x1p80f;
        least = usual ? 0.125f * scale : 1.0f;
        most = usual ? 2816.0f * scale : -1.0f;
    }

    // Whether a block with this largest magnitude has a scale from 2^-6 to 448, rounded by at most 1/16. Then no
    // quotient reaches 7, and no intermediate value leaves the range of plain arithmetic. In common data these are all
    // blocks except those of zeros. False for NaN.
    __device__ bool plain(float amax) const { return amax >= least && amax <= most; }
};

// The scale of an NVFP4 block.
struct Nvfp4Scale {
    uint32_t code = ue4m3_nan;   // in ue4m3
    float value = 0.0f;          // the value of the code
    float step = 0.0f;           // f32(global scale x value), the value of an e2m1 code of 1; 0 if it underflows

    __device__ Nvfp4Scale() {}   // of a block that is not finite

    // `wanted` is f32(f32(amax / 6) / global scale), or the same of 4.
    __device__ Nvfp4Scale(float wanted, float global_scale) {
        code = ptx::cvt_rn_satfinite_e4m3x2_f32(0.0f, fmaxf(wanted, 0x1p-9f));   // at most 448
        float unused;
        unpack_pair(ptx::cvt_rn_f16x2_e4m3x2(code), value, unused);
        step = global_scale * value;
    }
};

// The scale of a plain block, or of a block of zeros under a usual global scale.
__device__ inline Nvfp4Scale plain_nvfp4_scale(float amax, const Nvfp4Global &global) {
    return Nvfp4Scale(global.divisor.quotient(plain_sixth(amax)), global.scale);
}

// f32(global scale x scale) of a ue4m3 byte, whose bit 7 is ignored.
__device__ inline float nvfp4_step(uint32_t code, float global_scale) {
    float value, unused;
    unpack_pair(ptx::cvt_rn_f16x2_e4m3x2(code & 0x7fu), value, unused);
    return global_scale * value;
}

// The target of a block's largest value: 6, the largest e2m1, or 4, whose neighbors are nearer.
enum class Nvfp4Target { six, four };

// The scale of a block whose largest magnitude is `amax` (NaN if any value is), and its values divided by the scale's
// step, in units of e2m1's encode(). Beyond `limit` the quotients need not be true.
template <int groups>
__device__ inline Nvfp4Scale divide_by_step(float (&values)[groups][8], float amax, Nvfp4Target target,
                                            const Nvfp4Global &global, float limit) {
    const bool six = target == Nvfp4Target::six;
    const auto each = [&](auto &&change) {
#pragma unroll
        for (auto &group : values)
#pragma unroll
            for (float &value : group) value = change(value);
    };
    Nvfp4Scale scale;
    Divisor divisor;
    if (global.plain(amax)) {
        scale = Nvfp4Scale(global.divisor.quotient(six ? plain_sixth(amax) : amax * 0.25f), global.scale);
        divisor = Divisor::plain(scale.step * (1.0f / E2m1::unit));
    } else {
        if ((__float_as_uint(amax) >> 23) != 255)
            scale =
                Nvfp4Scale(global.divisor.quotient(global.divisor.fitted(six ? sixth(amax) : amax * 0.25f, 1024.0f)),
                           global.scale);
        divisor = Divisor::any(scale.step == 0.0f ? 1.0f : scale.step * (1.0f / E2m1::unit));
        each([&](float value) { return divisor.fitted(value, limit * E2m1::unit); });
    }
    each([&](float value) { return divisor.quotient(value); });
    return scale;
}

// Encodes quotients; a step of 0 gives codes of 0.
template <bool below_7, int groups>
__device__ inline void encode_nvfp4(const float (&quotients)[groups][8], const Nvfp4Scale &scale,
                                    Codes<4> (&codes)[groups]) {
    const uint32_t keep = scale.step == 0.0f ? 0 : ~0u;
#pragma unroll
    for (int group = 0; group < groups; ++group) {
        codes[group] = below_7 ? E2m1::encode_below_7(quotients[group]) : E2m1::encode(quotients[group]);
        codes[group].word[0] &= keep;
    }
}

// The squared error of eight values in units of the global scale: the pairwise sum of f32((quotient - code) value)^2.
// Every operation is rounded separately, since the choice between scales, and so the bytes, depends on it.
__device__ inline float squared_error(const float (&quotients)[8], const Codes<4> &codes, const Nvfp4Scale &scale) {
    float errors[8];
    E2m1::decode(codes, errors);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float error = __fmul_rn(__fsub_rn(quotients[i] * (1.0f / E2m1::unit), errors[i]), scale.value);
        errors[i] = __fmul_rn(error, error);
    }
#pragma unroll
    for (int width = 1; width < 8; width *= 2)
#pragma unroll
        for (int i = 0; i < 8; i += 2 * width) errors[i] = __fadd_rn(errors[i], errors[i + width]);
    return errors[0];
}

// The scale of a block of 16 values, and its codes. With better_of_two the largest value becomes 4 instead of 6 if that
// gives a smaller squared error.
template <bool better_of_two>
__device__ inline Nvfp4Scale encode_nvfp4_block(const float (&values)[2][8], float amax, const Nvfp4Global &global,
                                                Codes<4> (&codes)[2]) {
    constexpr int candidates = better_of_two ? 2 : 1;
    Nvfp4Scale scale[candidates];
    Codes<4> candidate[candidates][2];
    float error[candidates] = {};
#pragma unroll
    for (int i = 0; i < candidates; ++i) {
        float quotients[2][8];
#pragma unroll
        for (int j = 0; j < 16; ++j) quotients[j / 8][j % 8] = values[j / 8][j % 8];
        // Errors need exact quotients, also the few beyond 7 at the smallest steps; codes alone do not.
        const Nvfp4Target target = i == 0 ? Nvfp4Target::six : Nvfp4Target::four;
        scale[i] = divide_by_step(quotients, amax, target, global, better_of_two ? 16.0f : 6.5f);
        encode_nvfp4<!better_of_two>(quotients, scale[i], candidate[i]);
        if constexpr (better_of_two) {
            error[i] = __fadd_rn(squared_error(quotients[0], candidate[i][0], scale[i]),
                                 squared_error(quotients[1], candidate[i][1], scale[i]));
        }
    }
    const bool four = better_of_two && scale[0].step != 0.0f && error[candidates - 1] < error[0];
#pragma unroll
    for (int half = 0; half < 2; ++half) codes[half] = candidate[four ? candidates - 1 : 0][half];
    return scale[four ? candidates - 1 : 0];
}

// Calls body(better_of_two) with NVFP4's rule, 0 or 1, as a compile-time constant: the second one needs more registers.
template <class Body>
__device__ inline void with_nvfp4_rule(int rule, Body &&body) {
    if (rule == 1) body(std::true_type{});
    else body(std::false_type{});
}

// The largest magnitude of some values; NaN if any is.
template <int count>
__device__ inline float amax_of(const float (&values)[count]) {
    float amax = fabsf(values[0]);
#pragma unroll
    for (int i = 1; i < count; ++i) amax = ptx::max_nan_f32(amax, fabsf(values[i]));
    return amax;
}

// Scales of a tile's rows in shared memory: `row_blocks` scales to a row, packed 4, 2 or 1 to a 32-bit word so that
// every word of a row is equally full; block b of a row is byte b % blocks_per_word of word b / blocks_per_word.
template <int rows, int row_blocks>
struct ScaleWords {
    static constexpr int blocks_per_word = row_blocks % 4 == 0 ? 4 : row_blocks % 2 == 0 ? 2 : 1;
    static constexpr int count = row_blocks / blocks_per_word;
    // Operand A reads 16 rows of two words at once: half the banks apart, they do not conflict.
    static constexpr int stride = rows + (count > 1 && rows % 32 == 0 ? 16 : 0);

    uint32_t words[count][stride];

    // Operand A, 16 rows from `first_row`: thread pair p of each quad carries word `word` + p, its even lane row g, its
    // odd lane row g + 8. A word past the end is repeated from the last; no selector names it.
    __device__ uint32_t operand_a(int word, int first_row) const {
        const int lane = ptx::laneid(), group = lane / 4, thread = lane % 4;
        return words[min(word + thread / 2, count - 1)][first_row + group + 8 * (thread % 2)];
    }

    // Operand B, four tiles of 8 columns whose scales are rows `first_row` .. + 31 here: thread t of each quad carries
    // column g of tile t, so that one load serves four tiles.
    __device__ uint32_t operand_b(int word, int first_row) const {
        const int lane = ptx::laneid(), group = lane / 4, thread = lane % 4;
        return words[word][first_row + 8 * thread + group];
    }
};

}   // namespace tile
