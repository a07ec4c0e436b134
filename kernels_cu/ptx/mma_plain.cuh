// mma.sync without scales: f16 accumulators, tf32, bytes as integers and as floats, and kind::f8f6f4; and the second
// form of kind::mxf4nvf4. No kernel uses them; the probes do.
//
// Fragments are as mma.cuh states them, with w = 1 for tf32 (K = 8) and w = 4 for bytes (K = 32). In an f16 accumulator
// register i holds C[2 i] in the lower half and C[2 i + 1] in the upper one.
#pragma once

#include <cstdint>
#include <type_traits>

#include "mma.cuh"
#include "portable/mma_plain.cuh"
#include "target.cuh"

namespace ptx {

// mma.sync of e4m3 and e5m2 without a kind.
constexpr bool has_fp8_mma = architecture >= 89;

// c += A B with A 16x16, B 16x8 and c 16x8, all in f16. Called by all 32 lanes, as every function here.
__device__ inline void mma_m16n8k16_f16_f16(uint32_t (&c)[2], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    portable::mma_m16n8k16_f16_f16(c, a, b);   // sm_80 and newer
}

// c += A B with A 16x8 and B 8x8 in tf32, of which the lower 13 bits of a register are ignored, and c 16x8 in f32.
__device__ inline void mma_m16n8k8_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    portable::mma_m16n8k8_tf32(c, a, b);   // sm_80 and newer
}

// c += A B with A 16x32 and B 32x8 in bytes with or without a sign, and c 16x8 in s32, which wraps.
template <bool is_signed>
__device__ inline void mma_m16n8k32_bytes(int (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    portable::mma_m16n8k32_bytes<is_signed>(c, a, b);   // sm_80 and newer
}

template <class Format>
constexpr bool is_fp8 = std::is_same_v<Format, E4m3> || std::is_same_v<Format, E5m2>;

// c += A B with A 16x32 and B 32x8 in e4m3 or e5m2, and c 16x8 in f32.
template <class FormatA, class FormatB>
__device__ inline void mma_m16n8k32_fp8(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    static_assert(is_fp8<FormatA> && is_fp8<FormatB>,
                  "without a kind, mma.sync multiplies e4m3 and e5m2; see mma_m16n8k32_f8f6f4");
    if constexpr (has_fp8_mma) {
        asm("mma.sync.aligned.m16n8k32.row.col.f32.%10.%11.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "C"(FormatA::name), "C"(FormatB::name));
    } else {
        portable::mma_m16n8k32_contained<FormatA, FormatB>(c, a, b);
    }
}

// The same with c in f16. The instruction is native alone: ptxas has it for sm_120a, and older targets take the
// stand-in.
template <class FormatA, class FormatB>
__device__ inline void mma_m16n8k32_fp8(uint32_t (&c)[2], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    static_assert(is_fp8<FormatA> && is_fp8<FormatB>,
                  "without a kind, mma.sync multiplies e4m3 and e5m2; see mma_m16n8k32_f8f6f4");
    if constexpr (has_block_scaled_mma) {
        asm("mma.sync.aligned.m16n8k32.row.col.f16.%8.%9.f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%0, %1};"
            : "+r"(c[0]), "+r"(c[1])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "C"(FormatA::name), "C"(FormatB::name));
    } else {
        portable::mma_m16n8k32_contained<FormatA, FormatB>(c, a, b);
    }
}

// c += A B with A 16x32 and B 32x8 in containers as mma_m16n8k32_mxf8f6f4 takes them, and c 16x8 in f32.
template <class FormatA, class FormatB>
__device__ inline void mma_m16n8k32_f8f6f4(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    static_assert(fits_container<FormatA> && fits_container<FormatB>,
                  "kind::f8f6f4 multiplies e4m3, e5m2, e3m2, e2m3 and e2m1");
    if constexpr (has_block_scaled_mma) {
        asm("mma.sync.aligned.kind::f8f6f4.m16n8k32.row.col.f32.%10.%11.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "C"(FormatA::name), "C"(FormatB::name));
    } else {
        portable::mma_m16n8k32_contained<FormatA, FormatB>(c, a, b);
    }
}

// The same with c in f16.
template <class FormatA, class FormatB>
__device__ inline void mma_m16n8k32_f8f6f4(uint32_t (&c)[2], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    static_assert(fits_container<FormatA> && fits_container<FormatB>,
                  "kind::f8f6f4 multiplies e4m3, e5m2, e3m2, e2m3 and e2m1");
    if constexpr (has_block_scaled_mma) {
        asm("mma.sync.aligned.kind::f8f6f4.m16n8k32.row.col.f16.%8.%9.f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%0, "
            "%1};"
            : "+r"(c[0]), "+r"(c[1])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "C"(FormatA::name), "C"(FormatB::name));
    } else {
        portable::mma_m16n8k32_contained<FormatA, FormatB>(c, a, b);
    }
}

// kind::mxf4nvf4 with one ue8m0 scale for each 32 k: the operation of mma_m16n8k64_mxf4 under another name in PTX.
template <int byte_a, int thread_a, int byte_b, int thread_b>
__device__ inline void mma_m16n8k64_mxf4nvf4_2x(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                                uint32_t scale_a, uint32_t scale_b) {
    if constexpr (has_block_scaled_mma) {
        static_assert((byte_a == 0 || byte_a == 2) && (byte_b == 0 || byte_b == 2),
                      "scale_vec::2X reads bytes 0 and 1, or 2 and 3: name byte 0 or 2");
        check_scale_threads<thread_a, thread_b>();
        asm("mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::2X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue8m0 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, %10, {%12, %13}, %11, {%14, %15};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(scale_a), "r"(scale_b), "n"(byte_a),
              "n"(thread_a), "n"(byte_b), "n"(thread_b));
    } else {
        mma_m16n8k64_mxf4<byte_a, thread_a, byte_b, thread_b>(c, a, b, scale_a, scale_b);
    }
}

}   // namespace ptx
