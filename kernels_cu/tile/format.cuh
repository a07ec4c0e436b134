// The element types of arrays in memory: conversions of 16 bytes to floats and back.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "../ptx/cvt.cuh"
#include "../ptx/math.cuh"

namespace tile {

// Elements of 16 bytes, the unit of every vector access.
template <class Element>
constexpr int elements_per_chunk = 16 / sizeof(Element);

template <class Element>
constexpr bool is_bf16 = std::is_same_v<Element, __nv_bfloat16>;

// The floats of one 16-byte chunk. Exact.
__device__ inline void unpack(uint4 chunk, float (&values)[4], float) {
    values[0] = __uint_as_float(chunk.x);
    values[1] = __uint_as_float(chunk.y);
    values[2] = __uint_as_float(chunk.z);
    values[3] = __uint_as_float(chunk.w);
}

__device__ inline void unpack(uint4 chunk, float (&values)[8], __nv_bfloat16) {
    const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {   // bf16 is the upper half of an f32
        values[2 * i] = __uint_as_float(words[i] << 16);
        values[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
}

__device__ inline void unpack(uint4 chunk, float (&values)[8], __half) {
    const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 pair = __half22float2(*reinterpret_cast<const __half2 *>(&words[i]));
        values[2 * i] = pair.x;
        values[2 * i + 1] = pair.y;
    }
}

// The largest magnitude in some chunks, NaN if any value is: of 16-bit elements two at a time.
template <int count>
__device__ inline float amax_of(const uint4 (&chunks)[count], float) {
    float amax = 0.0f;
#pragma unroll
    for (const uint4 &chunk : chunks) {
        float values[4];
        unpack(chunk, values, float{});
#pragma unroll
        for (float value : values) amax = ptx::max_nan_f32(amax, fabsf(value));
    }
    return amax;
}

// Pairs of 16-bit elements, both halves at once: magnitudes, and the larger of two, NaN if either is.
__device__ inline uint32_t magnitudes(uint32_t pair, __nv_bfloat16) { return ptx::abs_bf16x2(pair); }
__device__ inline uint32_t magnitudes(uint32_t pair, __half) { return ptx::abs_f16x2(pair); }
__device__ inline uint32_t max_nan(uint32_t a, uint32_t b, __nv_bfloat16) { return ptx::max_nan_bf16x2(a, b); }
__device__ inline uint32_t max_nan(uint32_t a, uint32_t b, __half) { return ptx::max_nan_f16x2(a, b); }

__device__ inline float2 unpack_pair(uint32_t pair, __nv_bfloat16) {
    return {ptx::low_bf16(pair), ptx::high_bf16(pair)};
}
__device__ inline float2 unpack_pair(uint32_t pair, __half) {
    return __half22float2(*reinterpret_cast<const __half2 *>(&pair));
}

template <int count, class Element>
__device__ inline float amax_of(const uint4 (&chunks)[count], Element) {
    uint32_t amax = 0;
#pragma unroll
    for (const uint4 &chunk : chunks)
#pragma unroll
        for (uint32_t pair : {chunk.x, chunk.y, chunk.z, chunk.w})
            amax = max_nan(amax, magnitudes(pair, Element{}), Element{});
    const float2 both = unpack_pair(amax, Element{});
    return ptx::max_nan_f32(both.x, both.y);
}

// The largest finite magnitude so far. A value that is not finite times 0 is NaN, which the maxima drop.
template <class Element>
struct FiniteMax;

__device__ inline uint32_t larger_finite(uint32_t largest, uint32_t pair, __nv_bfloat16) {
    return ptx::max_bf16x2(largest, ptx::abs_bf16x2(ptx::fma_rn_bf16x2(pair, 0, pair)));
}
__device__ inline uint32_t larger_finite(uint32_t largest, uint32_t pair, __half) {
    return ptx::max_f16x2(largest, ptx::abs_f16x2(ptx::fma_rn_f16x2(pair, 0, pair)));
}

template <>
struct FiniteMax<float> {
    float largest = 0.0f;

    __device__ void take(float value) { largest = fmaxf(largest, fabsf(fmaf(value, 0.0f, value))); }
    __device__ void take(uint4 chunk) {
        float values[4];
        unpack(chunk, values, float{});
#pragma unroll
        for (float value : values) take(value);
    }
    __device__ float value() const { return largest; }
};

template <class Element>
struct FiniteMax {
    FiniteMax<float> of_single;
    uint32_t of_pairs = 0;

    __device__ void take(float value) { of_single.take(value); }
    __device__ void take(uint4 chunk) {
#pragma unroll
        for (uint32_t pair : {chunk.x, chunk.y, chunk.z, chunk.w}) of_pairs = larger_finite(of_pairs, pair, Element{});
    }
    __device__ float value() const {
        const float2 both = unpack_pair(of_pairs, Element{});
        return fmaxf(of_single.value(), fmaxf(both.x, both.y));
    }
};

// Stores in one instruction. An assignment through a vector type may compile to stores of single words, which write a
// quarter of each sector at a time.
__device__ inline void store(void *target, uint4 words) { __stwb(reinterpret_cast<uint4 *>(target), words); }
__device__ inline void store(void *target, uint2 words) { __stwb(reinterpret_cast<uint2 *>(target), words); }

// One 16-byte chunk of the values, rounded to nearest, ties to even.
__device__ inline uint4 pack(const float (&values)[4], float) {
    return {__float_as_uint(values[0]), __float_as_uint(values[1]), __float_as_uint(values[2]),
            __float_as_uint(values[3])};
}

__device__ inline uint4 pack(const float (&values)[8], __nv_bfloat16) {
    return {ptx::cvt_rn_bf16x2_f32(values[1], values[0]), ptx::cvt_rn_bf16x2_f32(values[3], values[2]),
            ptx::cvt_rn_bf16x2_f32(values[5], values[4]), ptx::cvt_rn_bf16x2_f32(values[7], values[6])};
}

__device__ inline uint4 pack(const float (&values)[8], __half) {
    return {ptx::cvt_rn_f16x2_f32(values[1], values[0]), ptx::cvt_rn_f16x2_f32(values[3], values[2]),
            ptx::cvt_rn_f16x2_f32(values[5], values[4]), ptx::cvt_rn_f16x2_f32(values[7], values[6])};
}

}   // namespace tile
