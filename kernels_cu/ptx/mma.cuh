// mma.sync: one matrix multiply-accumulate per function, a whole warp at a time.
//
// Fragments (PTX ISA 9.0, 9.7.14.5), for lane = 4 g + t, register r, element e of a register (lowest bits first), with w
// elements in a register and K the depth of the instruction:
//   A[r][e]: row g + 8 (r & 1),  k = w t + e + (K / 2) (r >> 1)      r = 0..3
//   B[r][e]: column g,           k = w t + e + (K / 2) r             r = 0..1
//   C[i]   : row g + 8 (i >> 1), column 2 t + (i & 1)                i = 0..3
#pragma once

#include <cstdint>

#include "target.cuh"
#include "portable/mma.cuh"

namespace ptx {

// c += A B with A 16x16 and B 16x8 in bf16 and c 16x8 in f32. Called by all 32 lanes.
__device__ inline void mma_m16n8k16_bf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    portable::mma_m16n8k16_bf16(c, a, b);   // sm_80 and newer, the same everywhere
}

// The same in f16.
__device__ inline void mma_m16n8k16_f16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    portable::mma_m16n8k16_f16(c, a, b);
}

// c += (A scaled by rows) (B scaled by columns) with A 16x32 and B 32x8 in e2m1, one ue8m0 scale per row of A and per
// column of B, c 16x8 in f32. Called by all 32 lanes.
//   a, b     one element per byte; e2m1 stands in bits 5..2 of its byte, the others are 0
//   scale_a  row m's scale is byte `byte_a` of lane 4 (m % 8) + 2 thread_a + m / 8; other lanes are not read
//   scale_b  column n's scale is byte `byte_b` of lane 4 n + thread_b; other lanes are not read
// The sums of the portable stand-in are those of two bf16 MMAs: the same products, another rounding of the sum.
// Source: PTX ISA 9.0, 9.7.14.3 (block scaling) and 9.7.14.5.
template <int byte_a, int thread_a, int byte_b, int thread_b>
__device__ inline void mma_m16n8k32_mxf8f6f4_e2m1_e2m1(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                                       uint32_t scale_a, uint32_t scale_b) {
    static_assert(0 <= byte_a && byte_a <= 3 && 0 <= byte_b && byte_b <= 3, "scale_vec::1X reads byte 0, 1, 2 or 3");
    static_assert(0 <= thread_a && thread_a <= 1, "A's scales stand in thread pair 0 or 1 of a quad");
    static_assert(0 <= thread_b && thread_b <= 3, "B's scales stand in thread 0, 1, 2 or 3 of a quad");
    if constexpr (has_block_scaled_mma) {
        asm("mma.sync.aligned.kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32.row.col.f32.e2m1.e2m1.f32.ue8m0 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, %10, {%12, %13}, %11, {%14, %15};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(scale_a), "r"(scale_b),
              "n"(byte_a), "n"(thread_a), "n"(byte_b), "n"(thread_b));
    } else {
        portable::mma_m16n8k32_mxf8f6f4_e2m1_e2m1<byte_a, thread_a, byte_b, thread_b>(c, a, b, scale_a, scale_b);
    }
}

}  // namespace ptx
