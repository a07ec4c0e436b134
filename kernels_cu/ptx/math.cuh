// Single-instruction arithmetic that C++ cannot name: approximations and NaN-propagating maxima.
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

// max(a, b), NaN if either is; fmaxf would drop it.
__device__ inline float max_nan_f32(float a, float b) {
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}

// The same for both halves of bf16 pairs.
__device__ inline uint32_t max_nan_bf16x2(uint32_t a, uint32_t b) {
    uint32_t result;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}

}  // namespace ptx
