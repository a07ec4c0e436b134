// mma.sync forms that sm_80 has, and stand-ins for those without scales that newer chips have: containers as f16.
//
// Every e4m3, e5m2, e3m2, e2m3 and e2m1 value is an f16: all products are exact. Only the order and the rounding of
// the sums differ from the instruction, which takes 32 products at once.
#pragma once

#include <cstdint>

#include "../cvt.cuh"
#include "mma.cuh"

namespace ptx::portable {

__device__ inline void mma_m16n8k16_f16_f16(uint32_t (&c)[2], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%0, %1};"
        : "+r"(c[0]), "+r"(c[1])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ inline void mma_m16n8k8_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <bool is_signed>
__device__ inline void mma_m16n8k32_bytes(int (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    if constexpr (is_signed)
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
            "%2, %3};"
            : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    else
        asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
            "%2, %3};"
            : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// c += A B of containers, c in f32.
template <class FormatA, class FormatB>
__device__ inline void mma_m16n8k32_contained(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    uint32_t rows[4][2], columns[2][2];
    f16x2_from(FormatA{}, a[0], a[1], rows[0], rows[1]);
    f16x2_from(FormatA{}, a[2], a[3], rows[2], rows[3]);
    f16x2_from(FormatB{}, b[0], b[1], columns[0], columns[1]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const uint32_t left[4] = {rows[2 * half][0], rows[2 * half + 1][0], rows[2 * half][1], rows[2 * half + 1][1]};
        mma_m16n8k16_f16(c, left, columns[half]);
    }
}

// The f16 in the lower or upper half of a register.
__device__ inline float f32_from_half(uint32_t pair, bool upper) {
    float value;
    asm("{.reg .b16 low, high, half; .reg .pred p; mov.b32 {low, high}, %1; setp.ne.u32 p, %2, 0;\n"
        "selp.b16 half, high, low, p; cvt.f32.f16 %0, half;}"
        : "=f"(value)
        : "r"(pair), "r"(uint32_t(upper)));
    return value;
}

// The same with c in f16: the sum in f32, rounded once. A sum that underflows is +0, as the instruction's.
template <class FormatA, class FormatB>
__device__ inline void mma_m16n8k32_contained(uint32_t (&c)[2], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    float wide[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) wide[i] = f32_from_half(c[i / 2], i % 2 != 0);
    mma_m16n8k32_contained<FormatA, FormatB>(wide, a, b);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32_t rounded = cvt_rn_f16x2_f32(wide[2 * i + 1], wide[2 * i]);
        asm("add.rn.f16x2 %0, %1, %2;" : "=r"(c[i]) : "r"(rounded), "r"(0u));
    }
}

}   // namespace ptx::portable
