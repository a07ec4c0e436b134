// Activations of matrix products, in float32.
#pragma once

#include "../ptx/math.cuh"
#include "merge.cuh"

namespace op {

// What is made of a sum and its bias, as an entry's scalar names it.
enum class Activation { none, relu, gelu, gelu_tanh, silu, swiglu };

// 1 / (1 + e^-x), within 2^-20; 1 of infinity, 0 of -infinity, NaN of NaN.
__device__ inline float sigmoid(float x) {
    // e^100 is infinite and e^-100 zero, the steps to them are finite.
    const float power = exp_f32(fmaxf(fminf(-x, 100.0f), -100.0f));
    return x != x ? x : ptx::rcp_approx_ftz_f32(1.0f + power);
}

// x sigmoid(x); of infinity that, of -infinity NaN, as the product of it and 0 is.
__device__ inline float silu(float x) { return x * sigmoid(x); }

// x Phi(x): by erf, or by the tanh that stands for it.
__device__ inline float gelu(float x) { return 0.5f * x * (1.0f + erff(x * 0.70710678f)); }
__device__ inline float gelu_tanh(float x) {
    return x * sigmoid(x * fmaf(x * x, 2.0f * 0.79788456f * 0.044715f, 2.0f * 0.79788456f));
}

// An activation of a lane's values: all but swiglu, which makes one of two. NaN of NaN.
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

// The gated activation: g sigmoid(alpha g) (u + offset) with g at most `limit` and u within it; NaN where either is.
struct Gate {
    float limit, alpha, offset;   // limit infinite: none

    __device__ float operator()(float gate, float up) const {
        const float g = gate > limit ? limit : gate;
        const float u = up > limit ? limit : up < -limit ? -limit : up;
        return g * sigmoid(alpha * g) * (u + offset);
    }
};

}   // namespace op
