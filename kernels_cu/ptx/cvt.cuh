// cvt: conversions between number formats. In the x2 forms the first source lands in the high half, as in PTX.
#pragma once

#include <cstdint>

#include "portable/cvt.cuh"
#include "target.cuh"

namespace ptx {

__device__ inline uint32_t cvt_rn_bf16x2_f32(float high, float low) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

__device__ inline uint32_t cvt_rn_f16x2_f32(float high, float low) {
    uint32_t packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// The unit of the next function's arguments: 1 for the instruction, 1/2 for its stand-in.
constexpr float e2m1_unit = has_narrow_conversions ? 1.0f : 0.5f;

// Eight values, in such units, to e2m1: to nearest, ties to even, saturated at 6; of NaN, any code (the hardware's is
// +6). values[i] lands in bits 4 i + 3 .. 4 i. Eight at once, because four conversions then merge into one register
// without a permutation. `below_7` promises magnitudes below 7.
template <bool below_7 = false>
__device__ inline uint32_t cvt_rn_satfinite_e2m1x8_units(const float (&values)[8]) {
    if constexpr (has_narrow_conversions) {
        uint32_t codes;
        asm("{\n"
            "  .reg .b8 pair0, pair1, pair2, pair3;\n"
            "  cvt.rn.satfinite.e2m1x2.f32 pair0, %2, %1;\n"
            "  cvt.rn.satfinite.e2m1x2.f32 pair1, %4, %3;\n"
            "  cvt.rn.satfinite.e2m1x2.f32 pair2, %6, %5;\n"
            "  cvt.rn.satfinite.e2m1x2.f32 pair3, %8, %7;\n"
            "  mov.b32 %0, {pair0, pair1, pair2, pair3};\n"
            "}"
            : "=r"(codes)
            : "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3]), "f"(values[4]), "f"(values[5]),
              "f"(values[6]), "f"(values[7]));
        return codes;
    } else {
        return portable::e2m1x8_from_halves<below_7>(values);
    }
}

// Eight values to e2m1 as above.
__device__ inline uint32_t cvt_rn_satfinite_e2m1x8_f32(const float (&values)[8]) {
    float units[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) units[i] = has_narrow_conversions ? values[i] : values[i] * e2m1_unit;
    return cvt_rn_satfinite_e2m1x8_units(units);
}

// The two floats of a pair of bf16.
__device__ inline float low_bf16(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ inline float high_bf16(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// a b for both halves of bf16 pairs.
__device__ inline uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
    return portable::mul_bf16x2(a, b);
}   // sm_80 and newer

// Eight bf16 values times a power of two to e2m1 as above; pairs[i] holds values 2 i and 2 i + 1, `factor` twice the
// power.
__device__ inline uint32_t cvt_rn_satfinite_e2m1x8_bf16x2(const uint32_t (&pairs)[4], uint32_t factor) {
    if constexpr (has_narrow_conversions) {
        float values[8];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t scaled = mul_bf16x2(pairs[i], factor);
            values[2 * i] = low_bf16(scaled);
            values[2 * i + 1] = high_bf16(scaled);
        }
        return cvt_rn_satfinite_e2m1x8_f32(values);
    } else {
        return portable::e2m1x8_from_bf16x2(pairs, factor);
    }
}

// Two values to e4m3, `low` in bits 7 .. 0, `high` in bits 15 .. 8: to nearest, ties to even, saturated; NaN to 0x7f.
__device__ inline uint32_t cvt_rn_satfinite_e4m3x2_f32(float high, float low) {
    if constexpr (has_fp8_conversions) {
        uint16_t codes;
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
        return codes;
    } else {
        const float values[4] = {low, high};
        return portable::e4m3x4_from_f32(values) & 0xffffu;
    }
}

// Four values to e4m3, values[i] in byte i: to nearest, ties to even, saturated; NaN to 0x7f.
__device__ inline uint32_t cvt_rn_satfinite_e4m3x4_f32(const float *values) {
    if constexpr (has_fp8_conversions) {
        uint32_t codes;
        asm("{\n"
            "  .reg .b16 low, high;\n"
            "  cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
            "  cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
            "  mov.b32 %0, {low, high};\n"
            "}"
            : "=r"(codes)
            : "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3]));
        return codes;
    } else {
        return portable::e4m3x4_from_f32(values);
    }
}

// Four values to e5m2, values[i] in byte i: to nearest, ties to even, saturated; NaN to 0x7f.
__device__ inline uint32_t cvt_rn_satfinite_e5m2x4_f32(const float *values) {
    if constexpr (has_fp8_conversions) {
        uint32_t codes;
        asm("{\n"
            "  .reg .b16 low, high;\n"
            "  cvt.rn.satfinite.e5m2x2.f32 low, %2, %1;\n"
            "  cvt.rn.satfinite.e5m2x2.f32 high, %4, %3;\n"
            "  mov.b32 %0, {low, high};\n"
            "}"
            : "=r"(codes)
            : "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3]));
        return codes;
    } else {
        return portable::e5m2x4_from_f32(values);
    }
}

// Four values to e3m2, values[i] in byte i (bits 5..0): to nearest, ties to even, saturated; NaN to 28 of either sign
// (the hardware's is +28).
__device__ inline uint32_t cvt_rn_satfinite_e3m2x4_f32(const float *values) {
    if constexpr (has_narrow_conversions) {
        uint32_t codes;
        asm("{\n"
            "  .reg .b16 low, high;\n"
            "  cvt.rn.satfinite.e3m2x2.f32 low, %2, %1;\n"
            "  cvt.rn.satfinite.e3m2x2.f32 high, %4, %3;\n"
            "  mov.b32 %0, {low, high};\n"
            "}"
            : "=r"(codes)
            : "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3]));
        return codes;
    } else {
        return portable::e3m2x4_from_f32(values);
    }
}

// Four values to e2m3, values[i] in byte i (bits 5..0): to nearest, ties to even, saturated; NaN to 7.5 of either sign
// (the hardware's is +7.5).
__device__ inline uint32_t cvt_rn_satfinite_e2m3x4_f32(const float *values) {
    if constexpr (has_narrow_conversions) {
        uint32_t codes;
        asm("{\n"
            "  .reg .b16 low, high;\n"
            "  cvt.rn.satfinite.e2m3x2.f32 low, %2, %1;\n"
            "  cvt.rn.satfinite.e2m3x2.f32 high, %4, %3;\n"
            "  mov.b32 %0, {low, high};\n"
            "}"
            : "=r"(codes)
            : "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3]));
        return codes;
    } else {
        return portable::e2m3x4_from_f32(values);
    }
}

// Both e2m1 values of byte `byte` of `codes` as f16x2, the low nibble in the low half. Exact.
template <int byte>
__device__ inline uint32_t cvt_rn_f16x2_e2m1x2(uint32_t codes) {
    if constexpr (has_narrow_conversions) {
        uint32_t values;
        asm("{\n"
            "  .reg .b8 bytes<4>;\n"
            "  mov.b32 {bytes0, bytes1, bytes2, bytes3}, %1;\n"
            "  cvt.rn.f16x2.e2m1x2 %0, bytes%2;\n"
            "}"
            : "=r"(values)
            : "r"(codes), "n"(byte));
        return values;
    } else {
        return portable::f16x2_from_e2m1x2(codes >> (8 * byte) & 0xffu);
    }
}

// The e4m3 values of bytes 0 and 1 of `pair` as f16x2. Exact.
__device__ inline uint32_t cvt_rn_f16x2_e4m3x2(uint32_t pair) {
    if constexpr (has_fp8_conversions) {
        uint32_t values;
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(values) : "h"(static_cast<uint16_t>(pair)));
        return values;
    } else {
        return portable::f16x2_from_e4m3x2(pair);
    }
}

// The e5m2 values of bytes 0 and 1 of `pair` as f16x2. Exact.
__device__ inline uint32_t cvt_rn_f16x2_e5m2x2(uint32_t pair) {
    if constexpr (has_fp8_conversions) {
        uint32_t values;
        asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(values) : "h"(static_cast<uint16_t>(pair)));
        return values;
    } else {
        return portable::f16x2_from_e5m2x2(pair);
    }
}

// Four bf16 values in two pairs times a power of two, which `factor` holds twice, to e3m2 as above.
__device__ inline uint32_t cvt_rn_satfinite_e3m2x4_bf16x2(const uint32_t *pairs, uint32_t factor) {
    if constexpr (has_narrow_conversions) {
        const uint32_t first = mul_bf16x2(pairs[0], factor), second = mul_bf16x2(pairs[1], factor);
        const float values[4] = {low_bf16(first), high_bf16(first), low_bf16(second), high_bf16(second)};
        return cvt_rn_satfinite_e3m2x4_f32(values);
    } else {
        return portable::e3m2x4_from_bf16x2(pairs, factor);
    }
}

// The e3m2 values of bytes 0 and 1 of `pair` as f16x2. Exact.
__device__ inline uint32_t cvt_rn_f16x2_e3m2x2(uint32_t pair) {
    if constexpr (has_narrow_conversions) {
        uint32_t values;
        asm("cvt.rn.f16x2.e3m2x2 %0, %1;" : "=r"(values) : "h"(static_cast<uint16_t>(pair)));
        return values;
    } else {
        return portable::f16x2_from_e3m2x2(pair);
    }
}

// Four bf16 values in two pairs times a power of two, which `factor` holds twice, to e2m3 as above.
__device__ inline uint32_t cvt_rn_satfinite_e2m3x4_bf16x2(const uint32_t *pairs, uint32_t factor) {
    if constexpr (has_narrow_conversions) {
        const uint32_t first = mul_bf16x2(pairs[0], factor), second = mul_bf16x2(pairs[1], factor);
        const float values[4] = {low_bf16(first), high_bf16(first), low_bf16(second), high_bf16(second)};
        return cvt_rn_satfinite_e2m3x4_f32(values);
    } else {
        return portable::e2m3x4_from_bf16x2(pairs, factor);
    }
}

// The e2m3 values of bytes 0 and 1 of `pair` as f16x2. Exact.
__device__ inline uint32_t cvt_rn_f16x2_e2m3x2(uint32_t pair) {
    if constexpr (has_narrow_conversions) {
        uint32_t values;
        asm("cvt.rn.f16x2.e2m3x2 %0, %1;" : "=r"(values) : "h"(static_cast<uint16_t>(pair)));
        return values;
    } else {
        return portable::f16x2_from_e2m3x2(pair);
    }
}

// A ue8m0 scale (0..255) as f32: 2^(scale - 127), subnormal for 0, NaN for 255. Exact.
__device__ inline float cvt_f32_ue8m0(uint32_t scale) {
    uint32_t bf16x2;
    if constexpr (has_narrow_conversions) {
        asm("cvt.rn.bf16x2.ue8m0x2 %0, %1;" : "=r"(bf16x2) : "h"(static_cast<uint16_t>(scale)));
    } else {
        bf16x2 = portable::bf16x2_from_ue8m0(scale);
    }
    return __uint_as_float(bf16x2 << 16);   // bf16 is the upper half of an f32
}

// The narrow element types by the names that PTX has for them, for templates over them.
struct E4m3 {
    static constexpr char name[] = "e4m3";
};
struct E5m2 {
    static constexpr char name[] = "e5m2";
};
struct E3m2 {
    static constexpr char name[] = "e3m2";
};
struct E2m3 {
    static constexpr char name[] = "e2m3";
};
struct E2m1 {
    static constexpr char name[] = "e2m1";
};

// Four values that are not negative to ue4m3 scales, values[i] in byte i: to nearest, ties to even, at most 448; NaN to
// 0x7f. ue4m3 is e4m3 without its sign.
__device__ inline uint32_t cvt_rn_satfinite_ue4m3x4_f32(const float *values) {
    return cvt_rn_satfinite_e4m3x4_f32(values);
}

// The ue4m3 scales of bytes 0 and 1 of `pair` as f16x2. Exact; bit 7 of a scale is ignored.
__device__ inline uint32_t cvt_rn_f16x2_ue4m3x2(uint32_t pair) { return cvt_rn_f16x2_e4m3x2(pair & 0x7f7fu); }

// Two magnitudes to ue8m0, rounded up to powers of two. Signs are dropped. Magnitudes below 2^-127 give 0, those above
// 2^127 give 254, and NaN gives 255.
__device__ inline uint32_t cvt_rp_satfinite_ue8m0x2_f32(float high, float low) {
    if constexpr (has_narrow_conversions) {
        uint16_t scales;
        asm("cvt.rp.satfinite.ue8m0x2.f32 %0, %1, %2;" : "=h"(scales) : "f"(high), "f"(low));
        return scales;
    } else {
        return portable::ue8m0_from_f32<true>(high) << 8 | portable::ue8m0_from_f32<true>(low);
    }
}

// The same, rounded down to powers of two.
__device__ inline uint32_t cvt_rz_satfinite_ue8m0x2_f32(float high, float low) {
    if constexpr (has_narrow_conversions) {
        uint16_t scales;
        asm("cvt.rz.satfinite.ue8m0x2.f32 %0, %1, %2;" : "=h"(scales) : "f"(high), "f"(low));
        return scales;
    } else {
        return portable::ue8m0_from_f32<false>(high) << 8 | portable::ue8m0_from_f32<false>(low);
    }
}

// The ue8m0 scales of bytes 0 and 1 of `pair` as bf16x2. Exact.
__device__ inline uint32_t cvt_rn_bf16x2_ue8m0x2(uint32_t pair) {
    if constexpr (has_narrow_conversions) {
        uint32_t values;
        asm("cvt.rn.bf16x2.ue8m0x2 %0, %1;" : "=r"(values) : "h"(static_cast<uint16_t>(pair)));
        return values;
    } else {
        return (portable::bf16x2_from_ue8m0(pair & 0xffu) & 0xffffu) |
               (portable::bf16x2_from_ue8m0(pair >> 8 & 0xffu) & 0xffff0000u);
    }
}

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
