// Conversions of whole words of codes.
#pragma once

#include <cstdint>

#include "cvt.cuh"

namespace ptx {

// Four e4m3 codes as two f16x2, in order. Exact. The conversion reads either half of the word where it is.
__device__ inline void cvt_rn_f16x2_e4m3x4(uint32_t (&values)[2], uint32_t word) {
    if constexpr (has_fp8_conversions) {
        asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2;\n"
            "cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high; }"
            : "=r"(values[0]), "=r"(values[1])
            : "r"(word));
    } else {
        values[0] = portable::f16x2_from_e4m3x2(word & 0xffffu);
        values[1] = portable::f16x2_from_e4m3x2(word >> 16);
    }
}

}   // namespace ptx
