// The element types of arrays in memory: how 16 bytes of them become floats and back.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "../ptx/cvt.cuh"

namespace tile {

// Elements of 16 bytes, the unit of every vector access.
template <class Element>
constexpr int elements_per_chunk = 16 / sizeof(Element);

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

// One 16-byte chunk of the values, rounded to nearest, ties to even.
__device__ inline uint4 pack(const float (&values)[4], float) {
    return {__float_as_uint(values[0]), __float_as_uint(values[1]), __float_as_uint(values[2]), __float_as_uint(values[3])};
}

__device__ inline uint4 pack(const float (&values)[8], __nv_bfloat16) {
    return {ptx::cvt_rn_bf16x2_f32(values[1], values[0]), ptx::cvt_rn_bf16x2_f32(values[3], values[2]),
            ptx::cvt_rn_bf16x2_f32(values[5], values[4]), ptx::cvt_rn_bf16x2_f32(values[7], values[6])};
}

__device__ inline uint4 pack(const float (&values)[8], __half) {
    return {ptx::cvt_rn_f16x2_f32(values[1], values[0]), ptx::cvt_rn_f16x2_f32(values[3], values[2]),
            ptx::cvt_rn_f16x2_f32(values[5], values[4]), ptx::cvt_rn_f16x2_f32(values[7], values[6])};
}

}  // namespace tile
