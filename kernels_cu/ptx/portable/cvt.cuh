// Stand-ins for the conversions to and from narrow formats, exact to the bit, with f32, bf16 and integer arithmetic.
#pragma once

#include <cstdint>

#include "../math.cuh"

namespace ptx::portable {

// a b in both halves; fma because mul.bf16x2 needs sm_90. -0 as the addend keeps the sign of a zero product.
__device__ inline uint32_t mul_bf16x2(uint32_t a, uint32_t b) { return fma_rn_bf16x2(a, b, 0x80008000u); }
__device__ inline uint32_t mul_f16x2(uint32_t a, uint32_t b) { return fma_rn_f16x2(a, b, 0x80008000u); }

// A bf16 constant in both halves.
constexpr uint32_t both_bf16(float value) { return (__builtin_bit_cast(uint32_t, value) >> 16) * 0x00010001u; }

// Byte i holds the low byte, with `upper` the high byte, of 16-bit half i of two registers.
__device__ inline uint32_t gather_bytes(uint32_t first, uint32_t second, bool upper) {
    return __byte_perm(first, second, upper ? 0x7531 : 0x6420);
}

// The upper bytes of four floats.
__device__ inline uint32_t upper_bytes(const float *values) {
    return __byte_perm(__byte_perm(__float_as_uint(values[0]), __float_as_uint(values[1]), 0x0073),
                       __byte_perm(__float_as_uint(values[2]), __float_as_uint(values[3]), 0x0073), 0x5410);
}

// All rounding here is that of one addition to a constant whose last bit is a step of the format. A format with few
// binades is a chain of straight pieces whose slope halves, so its code is the smallest of the pieces, each rounded by
// itself: with steps of 1/2, min(2 a, a + 2, a / 2 + 4) is e2m1's code of a. The constants are even, so that ties go to
// even codes.

// Eight values to e2m1 as the hardware converts them, except NaN, which becomes any code. Value i lands in bits 4 i + 3
// .. 4 i. Arguments are half the values, which is free where they are products or quotients.
//
// In f32 the code is a sum of saturated pieces, which needs additions alone: the code grows by 4 up to a value of 2, by
// 2 more up to 4 and by 1 more up to 6; if one of the three is a fraction, the later ones are 0. Magnitudes below 7
// need no saturation and one operation less: each piece is the sum with a constant of another last bit (1/4, 1/2 and 1
// in halves), whose integer difference to the first piece's constant is exact.
template <bool below_7>
__device__ inline uint32_t e2m1x8_from_halves(const float (&halves)[8]) {
    uint32_t codes[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float half = fabsf(halves[i]);
        if constexpr (below_7) {
            const int first = __float_as_int(half + 0x1p21f), second = __float_as_int(half + 0x1p22f),
                      third = __float_as_int(half + 0x1p23f);
            codes[i] = min(min(first, second - (1 << 23) + 2), third - (2 << 23) + 4);
        } else {
            const float first = __saturatef(half), second = __saturatef(half - 1.0f), third = __saturatef(half - 2.0f);
            codes[i] = __float_as_uint(third + fmaf(second, 2.0f, fmaf(first, 4.0f, 0x1p23f)));
        }
    }
    uint32_t bytes[4];   // the lowest of each holds two codes
#pragma unroll
    for (int i = 0; i < 4; ++i) bytes[i] = codes[2 * i] + (codes[2 * i + 1] << 4);
    const uint32_t packed =
        __byte_perm(__byte_perm(bytes[0], bytes[1], 0x0040), __byte_perm(bytes[2], bytes[3], 0x0040), 0x5410);
    const float even[4] = {halves[0], halves[2], halves[4], halves[6]},
                odd[4] = {halves[1], halves[3], halves[5], halves[7]};
    return packed | (upper_bytes(odd) & 0x80808080u) | (upper_bytes(even) >> 4 & 0x08080808u);
}

// The same of eight bf16 values times a power of two, given in both halves of `factor`; pairs[i] holds values 2 i and 2
// i + 1. Codes are counted in quarters from 32, whose lower byte is 0.
__device__ inline uint32_t e2m1x8_from_bf16x2(const uint32_t (&pairs)[4], uint32_t factor) {
    const uint32_t half = mul_bf16x2(factor, both_bf16(0.5f)), quarter = mul_bf16x2(factor, both_bf16(0.25f)),
                   eighth = mul_bf16x2(factor, both_bf16(0.125f));
    uint32_t codes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32_t magnitudes = abs_bf16x2(pairs[i]);
        const uint32_t lower = min_bf16x2(fma_rn_bf16x2(magnitudes, half, both_bf16(32.0f)),
                                          fma_rn_bf16x2(magnitudes, quarter, both_bf16(32.5f)));
        const uint32_t all = min_bf16x2(lower, fma_rn_bf16x2(magnitudes, eighth, both_bf16(33.0f)));
        codes[i] = min_bf16x2(all, both_bf16(33.75f));
    }
    // In order of bytes: values 0, 2, 1, 3 and 4, 6, 5, 7; then the even ones and the odd ones.
    const uint32_t first = __byte_perm(codes[0], codes[1], 0x6240), second = __byte_perm(codes[2], codes[3], 0x6240);
    const uint32_t first_signs = __byte_perm(pairs[0], pairs[1], 0x7351),
                   second_signs = __byte_perm(pairs[2], pairs[3], 0x7351);
    const uint32_t packed = __byte_perm(first, second, 0x5410) + (__byte_perm(first, second, 0x7632) << 4);
    const uint32_t even = __byte_perm(first_signs, second_signs, 0x5410),
                   odd = __byte_perm(first_signs, second_signs, 0x7632);
    return select_bits(0x08080808u, even >> 4, select_bits(0x80808080u, odd, packed));
}

// Four codes in the lower five bits of a byte each, the signs of their values in bit 7 of the bytes of `signs`: both as
// 6-bit codes.
__device__ inline uint32_t with_signs_6bit(uint32_t codes, uint32_t signs) {
    return codes | (signs >> 2 & 0x20202020u);
}

// Four values to e2m3 as the hardware converts them, except for the sign of NaN; byte i holds value i. Steps of 1/8.
__device__ inline uint32_t e2m3x4_from_f32(const float *values) {
    uint32_t codes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float magnitude = fminf(fabsf(values[i]), 7.5f);
        const float first = __saturatef(magnitude * 0.5f), second = __saturatef(fmaf(magnitude, 0.5f, -1.0f)),
                    third = __saturatef(fmaf(magnitude, 0.25f, -1.0f));
        codes[i] = __float_as_uint(fmaf(third, 8.0f, fmaf(second, 8.0f, fmaf(first, 16.0f, 0x1p23f))));
    }
    const uint32_t packed =
        __byte_perm(__byte_perm(codes[0], codes[1], 0x0040), __byte_perm(codes[2], codes[3], 0x0040), 0x5410);
    return with_signs_6bit(packed, upper_bytes(values));
}

__device__ inline uint32_t e2m3x4_from_bf16x2(const uint32_t *pairs, uint32_t factor) {
    const uint32_t half = mul_bf16x2(factor, both_bf16(0.5f)), quarter = mul_bf16x2(factor, both_bf16(0.25f)),
                   eighth = mul_bf16x2(factor, both_bf16(0.125f));
    uint32_t codes[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32_t magnitudes = abs_bf16x2(pairs[i]);
        const uint32_t lower = min_bf16x2(fma_rn_bf16x2(magnitudes, half, both_bf16(8.0f)),
                                          fma_rn_bf16x2(magnitudes, quarter, both_bf16(8.5f)));
        const uint32_t all = min_bf16x2(lower, fma_rn_bf16x2(magnitudes, eighth, both_bf16(9.0f)));
        codes[i] = min_bf16x2(all, both_bf16(9.9375f));
    }
    return with_signs_6bit(gather_bytes(codes[0], codes[1], false), gather_bytes(pairs[0], pairs[1], true));
}

// e3m2 has too many binades for pieces. Adding 2^5 times a value's own binade, no less than the smallest normal one, to
// a bf16 rounds it to that binade's step (in f32, 2^21 times); the sum less the same is the rounded value. The format's
// subnormals are those of bf16 (or f16) times a power of two, so after that multiplication the code is the value's
// bits.
__device__ inline uint32_t e3m2x4_from_f32(const float *values) {
    uint32_t rounded[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float pair[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const float magnitude = fminf(fabsf(values[2 * i + j]), 28.0f);
            const float binade = fmaxf(__uint_as_float(__float_as_uint(magnitude) & 0x7f800000u), 0.25f);
            pair[j] = fmaf(binade, -0x1p21f, fmaf(binade, 0x1p21f, magnitude));
        }
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(rounded[i]) : "f"(pair[1]), "f"(pair[0]));
        rounded[i] = mul_bf16x2(rounded[i], both_bf16(0x1p-124f)) >> 5;
    }
    return with_signs_6bit(gather_bytes(rounded[0], rounded[1], false), upper_bytes(values));
}

__device__ inline uint32_t e3m2x4_from_bf16x2(const uint32_t *pairs, uint32_t factor) {
    uint32_t rounded[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32_t magnitudes = min_bf16x2(mul_bf16x2(abs_bf16x2(pairs[i]), factor), both_bf16(28.0f));
        const uint32_t binades = max_bf16x2(magnitudes & 0x7f807f80u, both_bf16(0.25f));
        const uint32_t value =
            fma_rn_bf16x2(binades, both_bf16(-32.0f), fma_rn_bf16x2(binades, both_bf16(32.0f), magnitudes));
        rounded[i] = mul_bf16x2(value, both_bf16(0x1p-124f)) >> 5;
    }
    return with_signs_6bit(gather_bytes(rounded[0], rounded[1], false), gather_bytes(pairs[0], pairs[1], true));
}

// Four floats to codes with `mantissa` mantissa bits, smallest normal exponent `min_exponent` and largest value
// `largest`: to nearest, ties to even, saturated, NaN to the largest. values[i] lands in byte i, its sign in bit `sign`
// of that.
//
// Adding 2^(23 - mantissa) times a value's binade rounds it to that binade's step and leaves the number of steps in the
// lowest bits of the sum; below the smallest normal the step stays, as that of subnormals. The code is that number plus
// 2^mantissa for each binade above the smallest, whose exponent stands in the upper bits of the same sum. Constants and
// signs are collected for all values at once.
template <int sign, int mantissa, int min_exponent>
__device__ inline uint32_t narrow_from_f32(const float *values, float largest) {
    constexpr int shift = 23 - mantissa;   // of an exponent field to the codes' exponent
    constexpr uint32_t smallest_magic = uint32_t(127 + min_exponent + shift) << 23;
    uint32_t codes = 0, signs = 0, ones = 0;
#pragma unroll
    for (int i = 3; i >= 0; --i) {
        const float value = fmaxf(fminf(values[i], largest), -largest);   // fminf makes +largest of a NaN
        const uint32_t word = __float_as_uint(value);
        const uint32_t magic = max((word & 0x7f800000u) + (uint32_t(shift) << 23), smallest_magic);
        const uint32_t sum = __float_as_uint(fabsf(value) + __uint_as_float(magic));
        codes = (codes << 8) + (sum & ((4u << mantissa) - 1)) + (sum >> shift);
        signs = __funnelshift_l(word, signs, 1);
        ones = ones << 8 | 1u;
    }
    codes -= ones * (smallest_magic >> shift);
    // Sign i moves to bit 8 i, which is where copies 7 bits apart put it.
    return codes | (signs * 0x00204081u & ones) << sign;
}

// NaN to 0x7f.
__device__ inline uint32_t with_nan_7f(const float *values, uint32_t codes) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (values[i] != values[i]) codes |= 0x7fu << (8 * i);
    return codes;
}
__device__ inline uint32_t e4m3x4_from_f32(const float *values) {
    return with_nan_7f(values, narrow_from_f32<7, 3, -6>(values, 448.0f));
}
__device__ inline uint32_t e5m2x4_from_f32(const float *values) {
    return with_nan_7f(values, narrow_from_f32<7, 2, -14>(values, 57344.0f));
}

// Two codes to f16x2, exact. `pair` holds one in bits 7..0, one in bits 15..8 (e2m1: bits 3..0 and 7..4). A code's
// exponent and mantissa go where those of f16 are, which gives the value times a power of two, subnormals included; one
// exact multiplication undoes it.
__device__ inline uint32_t f16x2_from_e2m1x2(uint32_t pair) {
    const uint32_t spread = (pair & 0xfu) | (pair & 0xf0u) << 12;
    return mul_f16x2((spread & 0x00080008u) << 12 | (spread & 0x00070007u) << 9, 0x74007400u);   // 2^14
}

__device__ inline uint32_t f16x2_from_e2m3x2(uint32_t pair) {
    const uint32_t spread = __byte_perm(pair, 0, 0x4140);
    return mul_f16x2((spread & 0x00200020u) << 10 | (spread & 0x001f001fu) << 7, 0x74007400u);   // 2^14
}

__device__ inline uint32_t f16x2_from_e3m2x2(uint32_t pair) {
    const uint32_t spread = __byte_perm(pair, 0, 0x4140);
    return mul_f16x2((spread & 0x00200020u) << 10 | (spread & 0x001f001fu) << 8, 0x6c006c00u);   // 2^12
}

__device__ inline uint32_t f16x2_from_e4m3x2(uint32_t pair) {
    const uint32_t spread = __byte_perm(pair, 0, 0x4140);
    uint32_t values = mul_f16x2((spread & 0x00800080u) << 8 | (spread & 0x007f007fu) << 7, 0x5c005c00u);   // 2^8
    if ((spread & 0x7fu) == 0x7fu) values |= 0x7fffu;   // e4m3's only NaN
    if ((spread & 0x007f0000u) == 0x007f0000u) values |= 0x7fff0000u;
    return values;
}

// e5m2 is the upper half of f16.
__device__ inline uint32_t f16x2_from_e5m2x2(uint32_t pair) { return __byte_perm(pair, 0, 0x1404); }

// A ue8m0 scale (0..255) as bf16 in both halves: 2^(scale - 127), subnormal for 0, NaN for 255.
__device__ inline uint32_t bf16x2_from_ue8m0(uint32_t scale) {
    uint32_t value = scale << 7;
    if (scale == 0) value = 0x0040u;
    if (scale == 255) value = 0x7fffu;
    return value * 0x00010001u;
}

// A magnitude to ue8m0, the exponent rounded up or down, at most 254; NaN to 255. The scale is the exponent field, but
// for 2^-127, which has scale 0 and no field of its own.
template <bool up>
__device__ inline uint32_t ue8m0_from_f32(float value) {
    const uint32_t bits = __float_as_uint(value) & 0x7fffffffu;
    const uint32_t rounded = up ? bits + (bits > 0x00400000u ? 0x7fffffu : 0u) : bits;
    return bits > 0x7f800000u ? 255u : min(rounded >> 23, 254u);
}

// Bytes of the register pair {high, low}: nibble i of `selectors` names the one for byte i; its bit 3 selects eight
// copies of that byte's highest bit instead.
__device__ inline uint32_t prmt_b32(uint32_t low, uint32_t high, uint32_t selectors) {
    uint32_t bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selectors));
    return bytes;
}

// The upper bytes of four e2m1 values in f16, whose lower bytes are all 0; `codes` holds them in bits 15..0.
__device__ inline uint32_t f16_upper_bytes_from_e2m1x4(uint32_t codes) {
    const uint32_t magnitudes = prmt_b32(0x3e3c3800u, 0x46444240u, codes & 0x7777u);   // 0 0.5 1 1.5, 2 3 4 6
    const uint32_t signs = prmt_b32(0x7f7f7f7fu, 0x7f7f7f7fu, codes);                  // 0 where negative
    return magnitudes | (~(signs << 1) & 0x80808080u);
}

// Eight e2m1 codes as four f16x2, in order. Exact.
__device__ inline void f16x2_from_e2m1x8(uint32_t codes, uint32_t (&values)[4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const uint32_t bytes = f16_upper_bytes_from_e2m1x4(half == 0 ? codes : codes >> 16);
        values[2 * half] = __byte_perm(bytes, 0, 0x1404);
        values[2 * half + 1] = __byte_perm(bytes, 0, 0x3424);
    }
}

// Two registers of four e2m1 containers each (bits 5..2 of every byte) as f16x2, in order. Exact.
__device__ inline void f16x2_from_e2m1_containers(uint32_t first, uint32_t second, uint32_t (&first_values)[2],
                                                  uint32_t (&second_values)[2]) {
    const uint32_t codes = (first >> 2 & 0x0f0f0f0fu) | (second << 2 & 0xf0f0f0f0u);   // taking turns
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const uint32_t bytes = f16_upper_bytes_from_e2m1x4(half == 0 ? codes : codes >> 16);
        first_values[half] = __byte_perm(bytes, 0, 0x2404);
        second_values[half] = __byte_perm(bytes, 0, 0x3414);
    }
}

}   // namespace ptx::portable
