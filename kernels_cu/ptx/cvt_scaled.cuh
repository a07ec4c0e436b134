// cvt of values below 8, whose stand-ins take fewer instructions.
#pragma once

#include <cstdint>

#include "cvt.cuh"
#include "portable/cvt_scaled.cuh"

namespace ptx {

// cvt_rn_satfinite_e2m1x8_units<true>().
__device__ inline uint32_t cvt_rn_satfinite_e2m1x8_units_below_7(const float (&values)[8]) {
    if constexpr (has_narrow_conversions) return cvt_rn_satfinite_e2m1x8_units<true>(values);
    else return portable::e2m1x8_from_halves_below_7(values);
}

// Eight values times a power of two to e2m1: to nearest, ties to even, saturated at 6; of NaN, any code. values[i]
// lands in bits 4 i + 3 .. 4 i. Products are below 8 in magnitude. The stand-in needs no product that nothing else
// uses.
__device__ inline uint32_t cvt_rn_satfinite_e2m1x8_scaled(const float (&values)[8], float factor) {
    if constexpr (has_narrow_conversions) {
        float products[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) products[i] = values[i] * factor;
        return cvt_rn_satfinite_e2m1x8_units(products);
    } else {
        return portable::e2m1x8_from_scaled(values, factor);
    }
}

}   // namespace ptx
