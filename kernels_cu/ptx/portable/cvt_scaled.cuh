// The stand-in for the conversion of values times a power of two to e2m1, exact to the bit.
#pragma once

#include <cstdint>

#include "cvt.cuh"

namespace ptx::portable {

// The pieces of e2m1x8_from_halves(), each with the product in its addition. A product from 7 on has a code of 8, whose
// highest bit makes it 7.
__device__ inline uint32_t e2m1x8_from_scaled(const float (&values)[8], float factor) {
    const float half = 0.5f * factor;
    int codes[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float magnitude = fabsf(values[i]);
        const int first = __float_as_int(fmaf(magnitude, half, 0x1p21f)),
                  second = __float_as_int(fmaf(magnitude, half, 0x1p22f)),
                  third = __float_as_int(fmaf(magnitude, half, 0x1p23f));
        codes[i] = min(min(first, second - (1 << 23) + 2), third - (2 << 23) + 4);
    }
    uint32_t bytes[4];   // the lowest of each holds two codes
#pragma unroll
    for (int i = 0; i < 4; ++i) bytes[i] = codes[2 * i] + (codes[2 * i + 1] << 4);
    const uint32_t packed =
        __byte_perm(__byte_perm(bytes[0], bytes[1], 0x0040), __byte_perm(bytes[2], bytes[3], 0x0040), 0x5410);
    const uint32_t saturated = packed - ((packed & 0x88888888u) >> 3);
    const float even[4] = {values[0], values[2], values[4], values[6]},
                odd[4] = {values[1], values[3], values[5], values[7]};
    return saturated | (upper_bytes(odd) & 0x80808080u) | (upper_bytes(even) >> 4 & 0x08080808u);
}

}   // namespace ptx::portable
