// Activations of matrix products, in float32.
#pragma once

#include "../ptx/math.cuh"
#include "merge.cuh"

namespace op {

// The activation of a sum and its bias, as numbered by the scalar of entries.
enum class Activation { none, relu, gelu, gelu_tanh, silu, swiglu };

// Sums and products are written so that no compiler fuses them: all kernels give the same bits.

// 1 / (1 + e^-x), within 2^-20; 1 for infinity, 0 for -infinity, NaN for NaN.
__device__ inline float sigmoid(float x) {
    // e^100 overflows and e^-100 underflows in float32, while the clamped exponent stays finite.
    const float exponent = ptx::max_nan_f32(-ptx::max_nan_f32(x, -100.0f), -100.0f);
    return ptx::rcp_approx_ftz_f32(__fadd_rn(1.0f, exp_f32(exponent)));
}

// x sigmoid(x); infinity for infinity, and NaN for -infinity, as -infinity times 0.
__device__ inline float silu(float x) { return __fmul_rn(x, sigmoid(x)); }

// x Phi(x) = max(x, 0) - h erfc(sqrt(2) h) with h = |x| / 2. The base-2 logarithm of the erfc is h times a polynomial,
// fitted for the least maximal error of the product. From 6.7 on the product is 0.
__device__ inline float gelu(float x) {
    constexpr float of_power[] = {-2.302231788635254f,    -1.8365060091018677f,    -0.42178454995155334f,
                                  0.11789172887802124f,   -0.01134790200740099f,   -0.006603346671909094f,
                                  0.0030920738354325294f, -0.0005232476396486163f, 3.151130295009352e-05f};
    const float half = 0.5f * fabsf(x), positive = fmaf(x, 0.5f, half);   // NaN for -infinity
    const float h = fminf(half, 6.7f);
    float polynomial = of_power[8];
#pragma unroll
    for (int i = 7; i >= 0; --i) polynomial = fmaf(polynomial, h, of_power[i]);
    return fmaf(-h, ptx::ex2_approx_ftz_f32(polynomial * h), positive);
}
// The approximation of gelu by tanh.
__device__ inline float gelu_tanh(float x) {
    const float factor = fmaf(__fmul_rn(x, x), 2.0f * 0.79788456f * 0.044715f, 2.0f * 0.79788456f);
    return __fmul_rn(x, sigmoid(__fmul_rn(x, factor)));
}

// The activation of a lane's values, except swiglu, which makes one value of two. NaN for NaN.
__device__ inline void activate(float (&values)[2][8], Activation activation) {
    const auto each = [&](auto &&change) {
#pragma unroll
        for (int i = 0; i < 16; ++i) values[i / 8][i % 8] = change(values[i / 8][i % 8]);
    };
    if (activation == Activation::relu) each([](float x) { return x < 0.0f ? 0.0f : x; });
    else if (activation == Activation::gelu) each(gelu);
    else if (activation == Activation::gelu_tanh) each(gelu_tanh);
    else if (activation == Activation::silu) each(silu);
}

// The gated activation: g sigmoid(alpha g) (u + offset) with g clamped to at most `limit` and u to +-limit; NaN if
// either is.
struct Gate {
    float limit, alpha, offset;   // limit infinite: none

    __device__ float operator()(float gate, float up) const {
        const float g = gate > limit ? limit : gate;
        const float u = up > limit ? limit : up < -limit ? -limit : up;
        return __fmul_rn(__fmul_rn(g, sigmoid(__fmul_rn(alpha, g))), __fadd_rn(u, offset));
    }
};

}   // namespace op
