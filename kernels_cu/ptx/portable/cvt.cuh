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

// The code (0..15) of x in e2m1: to nearest, ties to even, saturated at 6; NaN becomes +6.
__device__ inline uint32_t e2m1_from_f32(float x) {
    const float magnitude = fminf(fabsf(x), 6.0f);   // fminf drops a NaN
    // Adding 2^22 times the value's binade rounds to that binade's step (a half in [0, 2), 1 in [2, 4), 2 in [4, 6]) and
    // leaves the number of steps in the lowest bits. Below 1 the step stays that of [1, 2): e2m1's subnormals.
    const uint32_t binade = max(__float_as_uint(magnitude) & 0x7f800000u, 0x3f800000u);
    const uint32_t steps = __float_as_uint(magnitude + __uint_as_float(binade + (22u << 23))) & 7u;
    const uint32_t sign = x != x ? 0u : __float_as_uint(x) >> 28 & 8u;
    return sign | (steps + 2u * ((binade >> 23) - 127u));
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
