// Stand-ins for mma.sync forms that only sm_12x has: dequantized fragments and bf16 mma.sync (sm_80 and newer).
#pragma once

#include <cstdint>

#include "../warp.cuh"
#include "cvt.cuh"

namespace ptx::portable {

__device__ inline void mma_m16n8k16_bf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ inline void mma_m16n8k16_f16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The scale of one row or column, from the lane that carries it, as bf16 in both halves.
template <int byte>
__device__ inline uint32_t scale_from_lane(uint32_t scales, int lane) {
    return bf16x2_from_ue8m0(shfl_sync_idx_b32(scales, lane) >> (8 * byte) & 0xffu);
}

// A value times its scale is exact in bf16 while it is at least 2^-133, the smallest bf16; e2m1 under ue8m0 goes down to
// 2^-128, so every product here is exact. Both MMAs see the same permutation of k in A and in B: bytes 0, 1 of a register
// as k = 2 t, 2 t + 1 and bytes 2, 3 as k = 2 t + 8, 2 t + 9.
template <int byte_a, int thread_a, int byte_b, int thread_b>
__device__ inline void mma_m16n8k32_mxf8f6f4_e2m1_e2m1(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                                       uint32_t scale_a, uint32_t scale_b) {
    const int quad = laneid() & ~3;
    const uint32_t row_scale[2] = {scale_from_lane<byte_a>(scale_a, quad + 2 * thread_a),
                                   scale_from_lane<byte_a>(scale_a, quad + 2 * thread_a + 1)};
    const uint32_t column_scale = scale_from_lane<byte_b>(scale_b, quad + thread_b);
#pragma unroll
    for (int half = 0; half < 2; ++half) {   // k 0..15, then 16..31
        uint32_t a16[4], b16[2];
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
#pragma unroll
            for (int row = 0; row < 2; ++row)
                a16[2 * pair + row] =
                    mul_bf16x2(bf16x2_from_e2m1_containers(a[2 * half + row], pair), row_scale[row]);
            b16[pair] = mul_bf16x2(bf16x2_from_e2m1_containers(b[half], pair), column_scale);
        }
        mma_m16n8k16_bf16(c, a16, b16);
    }
}

}  // namespace ptx::portable
