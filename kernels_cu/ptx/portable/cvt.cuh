// Stand-ins for the conversions to and from e2m1 and ue8m0, exact to the bit, with integer and bf16 arithmetic.
#pragma once

#include <cstdint>

namespace ptx::portable {

// a b in both halves; fma because mul.bf16x2 needs sm_90. -0 as the addend keeps the sign of a zero product.
__device__ inline uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
    uint32_t product;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
    return product;
}

__device__ inline uint32_t max_bf16x2(uint32_t a, uint32_t b) {
    uint32_t result;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}

__device__ inline uint32_t min_bf16x2(uint32_t a, uint32_t b) {
    uint32_t result;
    asm("min.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}

// Floats to codes with `mantissa` mantissa bits, smallest normal exponent `min_exponent` and largest value `largest`: to
// nearest, ties to even, saturated, NaN to the largest. values[i] lands at bit `stride` i, its sign at bit `sign` from there.
//
// Adding 2^(23 - mantissa) times a value's binade rounds it to that binade's step and leaves the number of steps in the
// lowest bits of the sum; below the smallest normal the step stays, as subnormals want. The code is that number plus
// 2^mantissa for each binade above the smallest, whose exponent stands in the upper bits of the same sum. Constants and
// signs are collected for all values at once.
template <int stride, int sign, int mantissa, int min_exponent, int count>
__device__ inline uint32_t narrow_from_f32(const float *values, float largest) {
    static_assert(stride * count == 32, "the codes fill a register");
    constexpr int shift = 23 - mantissa;   // of an exponent field to the codes' exponent
    constexpr uint32_t smallest_magic = uint32_t(127 + min_exponent + shift) << 23;
    uint32_t codes = 0, signs = 0, ones = 0;
#pragma unroll
    for (int i = count - 1; i >= 0; --i) {
        const float value = fmaxf(fminf(values[i], largest), -largest);   // fminf makes +largest of a NaN
        const uint32_t word = __float_as_uint(value);
        const uint32_t magic = max((word & 0x7f800000u) + (uint32_t(shift) << 23), smallest_magic);
        const uint32_t sum = __float_as_uint(fabsf(value) + __uint_as_float(magic));
        codes = (codes << stride) + (sum & ((4u << mantissa) - 1)) + (sum >> shift);
        signs = __funnelshift_l(word, signs, 1);
        ones = ones << stride | 1u;
    }
    codes -= ones * (smallest_magic >> shift);
    uint32_t spread = 0;
    if constexpr (count == 8) {   // 4 bits: bit i moves to bit 4 i
        spread = (signs | signs << 12) & 0x000f000fu;
        spread = (spread | spread << 6) & 0x03030303u;
        spread = (spread | spread << 3) & 0x11111111u;
    } else {   // 8 bits: bit i moves to bit 8 i, which is where copies 7 bits apart put it
        spread = signs * 0x00204081u & ones;
    }
    return codes | spread << sign;
}

// The same for a pair of bf16, which all these formats can be rounded from in bf16: a code of the low half in bits 7..0, of
// the high half in bits 23..16, the sign at bit `sign` of each. 7 instead of 23 mantissa bits, otherwise as above.
template <int sign, int mantissa, int min_exponent>
__device__ inline uint32_t narrow_from_bf16x2(uint32_t pair, uint32_t largest) {
    constexpr int shift = 7 - mantissa;
    constexpr uint32_t halves = 0x00010001u, smallest = uint32_t(127 + min_exponent) << 7;
    const uint32_t magnitude = min_bf16x2(pair & 0x7fff7fffu, largest);   // the minimum drops a NaN
    const uint32_t magic = max_bf16x2(magnitude & 0x7f807f80u, halves * smallest) + halves * (uint32_t(shift) << 7);
    uint32_t sum;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(magnitude), "r"(0x3f803f80u), "r"(magic));
    sum -= halves * (smallest + (uint32_t(shift) << 7));
    const uint32_t codes = sum + ((sum & halves * 0xff80u) >> shift);
    return (codes & halves * ((1u << sign) - 1)) | (pair >> (15 - sign) & halves << sign);
}

// Two codes to f16x2, exact. `pair` holds one in bits 7..0, one in bits 15..8 (e2m1: bits 3..0 and 7..4). A code's exponent
// and mantissa go where those of f16 are, which gives the value times a power of two, subnormals included; one exact
// multiplication undoes it.
__device__ inline uint32_t mul_f16x2(uint32_t a, uint32_t b) {
    uint32_t product;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
    return product;
}

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

// Elements 2 pair and 2 pair + 1 of a register of four e2m1 containers (bits 5..2 of each byte) as bf16x2.
__device__ inline uint32_t bf16x2_from_e2m1_containers(uint32_t containers, int pair) {
    const uint32_t spread = __byte_perm(containers, 0, pair == 0 ? 0x4140 : 0x4342);
    // Sign to bit 15, exponent and mantissa to bits 8..6: the value times 2^-126, e2m1's subnormal as a bf16 subnormal.
    const uint32_t shifted = (spread & 0x00200020u) << 10 | (spread & 0x001c001cu) << 4;
    return mul_bf16x2(shifted, 0x7e807e80u);
}

// A ue8m0 scale (0..255) as bf16 in both halves: 2^(scale - 127), subnormal for 0, NaN for 255.
__device__ inline uint32_t bf16x2_from_ue8m0(uint32_t scale) {
    uint32_t value = scale << 7;
    if (scale == 0) value = 0x0040u;
    if (scale == 255) value = 0x7fffu;
    return value * 0x00010001u;
}

// A magnitude to ue8m0, the exponent rounded up or down, at most 254; NaN to 255. The scale is the exponent field, but for
// 2^-127, which has scale 0 and no field of its own.
template <bool up>
__device__ inline uint32_t ue8m0_from_f32(float value) {
    const uint32_t bits = __float_as_uint(value) & 0x7fffffffu;
    const uint32_t rounded = up ? bits + (bits > 0x00400000u ? 0x7fffffu : 0u) : bits;
    return bits > 0x7f800000u ? 255u : min(rounded >> 23, 254u);
}

// Bytes of the register pair {high, low}: nibble i of `selectors` names the one for byte i; its bit 3 asks for eight copies
// of that byte's highest bit instead.
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

}  // namespace ptx::portable
