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

// Eight values to e2m1, values[i] to bits 4 i + 3 .. 4 i: to nearest, ties to even, saturated at 6, NaN to +6.
//
// Adding 2^22 times a value's binade rounds it to that binade's step (a half in [1, 2), 1 in [2, 4), 2 in [4, 8)) and leaves
// the number of steps in the lowest bits of the sum; below 1 the step stays a half, as e2m1's subnormals want. The code is
// that number, 0..4, plus twice the binade's exponent, which stands in the upper bits of the same sum. Constants and signs
// are collected for all eight at once.
__device__ inline uint32_t e2m1x8_from_f32(const float (&values)[8]) {
    uint32_t codes = 0, signs = 0;
#pragma unroll
    for (int i = 7; i >= 0; --i) {
        const float value = fmaxf(fminf(values[i], 6.0f), -6.0f);   // fminf makes +6 of a NaN
        const uint32_t bits = __float_as_uint(value);
        const uint32_t magic = max((bits & 0x7f800000u) + (22u << 23), (127u + 22u) << 23);
        const uint32_t sum = __float_as_uint(fabsf(value) + __uint_as_float(magic));
        codes = 16 * codes + (sum & 7u) + (sum >> 22);
        signs = __funnelshift_l(bits, signs, 1);
    }
    codes -= 0x11111111u * (2u * (127u + 22u));
    signs = (signs | signs << 12) & 0x000f000fu;   // bit i moves to bit 4 i
    signs = (signs | signs << 6) & 0x03030303u;
    signs = (signs | signs << 3) & 0x11111111u;
    return codes | signs << 3;
}

// Both values of a byte of e2m1 (even element in the low nibble) as f16x2.
__device__ inline uint32_t f16x2_from_e2m1x2(uint32_t byte) {
    const uint32_t spread = (byte & 0xfu) | (byte & 0xf0u) << 12;
    // Sign to bit 15, exponent and mantissa to bits 11..9: the value times 2^-14, e2m1's subnormal as an f16 subnormal.
    const uint32_t shifted = (spread & 0x00080008u) << 12 | (spread & 0x00070007u) << 9;
    uint32_t values;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(values) : "r"(shifted), "r"(0x74007400u), "r"(0x80008000u));
    return values;
}

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

}  // namespace ptx::portable
