// Stand-ins for the conversion of values below 8 to e2m1, exact to the bit.
#pragma once

#include <cstdint>

#include "cvt.cuh"

namespace ptx::portable {

// The magnitudes of eight e2m1 codes, code i in bits 4 i + 3 .. 4 i. sum(i, constant) is half the magnitude of value i
// plus a constant, rounded once. A magnitude from 7 on has a code of 8.
//
// The step of floats doubles where a sum reaches a power of two. The first sum has steps of 1/4, those of halves below
// 1. The second one passes 2^23 at a half of 2: before it steps are 1/2, from it on 1. The code is the smaller of both,
// as numbers of steps. Both constants are even numbers of steps, so that ties go to even codes.
template <class Sum>
__device__ inline uint32_t e2m1x8_from_sums(Sum &&sum) {
    constexpr float of_first = 0x1p21f, of_second = 0x1p23f - 2.0f;
    constexpr int more = __builtin_bit_cast(int, of_first) - __builtin_bit_cast(int, of_second) + 2;
    int codes[8];
#pragma unroll
    for (int i = 0; i < 8; ++i)
        codes[i] = min(__float_as_int(sum(i, of_first)), __float_as_int(sum(i, of_second)) + more);
    uint32_t bytes[4];   // the lowest of each holds two codes
#pragma unroll
    for (int i = 0; i < 4; ++i) bytes[i] = codes[2 * i] + (codes[2 * i + 1] << 4);
    return __byte_perm(__byte_perm(bytes[0], bytes[1], 0x0040), __byte_perm(bytes[2], bytes[3], 0x0040), 0x5410);
}

__device__ inline uint32_t with_signs_e2m1(uint32_t codes, const float (&values)[8]) {
    const float even[4] = {values[0], values[2], values[4], values[6]},
                odd[4] = {values[1], values[3], values[5], values[7]};
    return codes | (upper_bytes(odd) & 0x80808080u) | (upper_bytes(even) >> 4 & 0x08080808u);
}

// e2m1x8_from_halves<true>() in fewer instructions.
__device__ inline uint32_t e2m1x8_from_halves_below_7(const float (&halves)[8]) {
    return with_signs_e2m1(e2m1x8_from_sums([&](int i, float constant) { return fabsf(halves[i]) + constant; }),
                           halves);
}

// Eight values times a power of two; the products are in the additions. The highest bit of a code of 8 makes it 7.
__device__ inline uint32_t e2m1x8_from_scaled(const float (&values)[8], float factor) {
    const float half = 0.5f * factor;
    const uint32_t codes =
        e2m1x8_from_sums([&](int i, float constant) { return fmaf(fabsf(values[i]), half, constant); });
    return with_signs_e2m1(codes - ((codes & 0x88888888u) >> 3), values);
}

}   // namespace ptx::portable
