// Approximations of roots.
#pragma once

namespace ptx {

// 1 / sqrt(x), within 2^-22.9 relative; subnormal numbers are zero. For a zero, an infinity of its sign.
__device__ inline float rsqrt_approx_ftz_f32(float x) {
    float result;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

}   // namespace ptx
