// Single instructions that C++ has no expression for: approximations and NaN-propagating maxima.
#pragma once

#include <cstdint>

namespace ptx {

// 2^x, within 2 ulp; subnormal inputs and results are zero, so one instruction. 2^-inf = +0.
__device__ inline float ex2_approx_ftz_f32(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

// log2 x, within 2^-22 absolute around 1 and relative elsewhere; of 0, -inf.
__device__ inline float lg2_approx_ftz_f32(float x) {
    float result;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

// 1 / x within 1 ulp.
__device__ inline float rcp_approx_ftz_f32(float x) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

// max(a, b); NaN if either is NaN, unlike fmaxf.
__device__ inline float max_nan_f32(float a, float b) {
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}

// The same for both halves of bf16 and f16 pairs.
__device__ inline uint32_t max_nan_bf16x2(uint32_t a, uint32_t b) {
    uint32_t result;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}
__device__ inline uint32_t max_nan_f16x2(uint32_t a, uint32_t b) {
    uint32_t result;
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}

// |a| for both halves.
__device__ inline uint32_t abs_bf16x2(uint32_t a) {
    uint32_t result;
    asm("abs.bf16x2 %0, %1;" : "=r"(result) : "r"(a));
    return result;
}
__device__ inline uint32_t abs_f16x2(uint32_t a) {
    uint32_t result;
    asm("abs.f16x2 %0, %1;" : "=r"(result) : "r"(a));
    return result;
}

// a b + c for both halves, rounded once.
__device__ inline uint32_t fma_rn_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t result;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
    return result;
}
__device__ inline uint32_t fma_rn_f16x2(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t result;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
    return result;
}

// The larger one for both halves; of a NaN and a number, the number.
__device__ inline uint32_t max_bf16x2(uint32_t a, uint32_t b) {
    uint32_t result;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}
__device__ inline uint32_t max_f16x2(uint32_t a, uint32_t b) {
    uint32_t result;
    asm("max.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}
__device__ inline uint32_t min_bf16x2(uint32_t a, uint32_t b) {
    uint32_t result;
    asm("min.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}

// Bits of `a` where `mask` is set, of `b` elsewhere. The compiler needs two instructions for the same in C++ with a
// constant mask.
__device__ inline uint32_t select_bits(uint32_t mask, uint32_t a, uint32_t b) {
    uint32_t result;
    asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(result) : "r"(mask), "r"(a), "r"(b));
    return result;
}

// Pairs of 16-bit integers, from sm_90 on (has_packed_integers), where a sum and the minimum or maximum of it are one
// instruction of the machine. relu: at least 0.
__device__ inline uint32_t add_s16x2(uint32_t a, uint32_t b) {
    uint32_t result;
    asm("add.s16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}
__device__ inline uint32_t max_s16x2(uint32_t a, uint32_t b) {
    uint32_t result;
    asm("max.s16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}
__device__ inline uint32_t min_relu_s16x2(uint32_t a, uint32_t b) {
    uint32_t result;
    asm("min.relu.s16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}

}   // namespace ptx
