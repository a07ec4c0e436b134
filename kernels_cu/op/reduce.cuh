// The largest finite magnitude of an array, and NVFP4's global scale from it.
#pragma once

#include <cstdint>

#include "../ptx/barrier.cuh"
#include "../ptx/warp.cuh"
#include "../tile/run.cuh"

namespace op {

constexpr int reduce_threads = 256;
constexpr int reduce_chunk = 4096;   // consecutive values that a block takes at a time

struct ReduceShared {
    float of_warp[reduce_threads / 32];
};

// The largest of the threads' values, in thread 0; all of them at least 0.
__device__ inline float block_max(ReduceShared &shared, float value) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) value = fmaxf(value, ptx::shfl_sync_bfly_f32(value, mask));
    if (threadIdx.x % 32 == 0) shared.of_warp[threadIdx.x / 32] = value;
    ptx::bar_sync();   // every warp's maximum is there
#pragma unroll
    for (int warp = 0; warp < reduce_threads / 32; ++warp) value = fmaxf(value, shared.of_warp[warp]);
    return value;
}

__device__ inline float finite_magnitude(float value) {
    const float magnitude = fabsf(value);
    return magnitude <= 3.4028235e38f ? magnitude : 0.0f;   // false for NaN, too
}

// partial[b] = the largest finite magnitude of the chunks b, b + gridDim.x, ... of x[count]; 0 if there is none.
template <class Element>
__device__ inline void amax(ReduceShared &shared, const Element *x, float *partial, int64_t count) {
    float largest = 0.0f;
    for (int64_t chunk = int64_t(blockIdx.x) * reduce_chunk; chunk < count; chunk += int64_t(gridDim.x) * reduce_chunk) {
        constexpr int steps = reduce_chunk / (reduce_threads * tile::lane_values);
        float values[steps][tile::lane_values];
#pragma unroll
        for (int step = 0; step < steps; ++step) {
            const int64_t first = chunk + (step * reduce_threads + threadIdx.x) * tile::lane_values;
            if (first + tile::lane_values <= count) {
                tile::load_values(x + first, values[step]);
            } else {
#pragma unroll
                for (int i = 0; i < tile::lane_values; ++i) values[step][i] = first + i < count ? float(x[first + i]) : 0.0f;
            }
        }
#pragma unroll
        for (int step = 0; step < steps; ++step)
#pragma unroll
            for (float value : values[step]) largest = fmaxf(largest, finite_magnitude(value));
    }
    largest = block_max(shared, largest);
    if (threadIdx.x == 0) partial[blockIdx.x] = largest;
}

// global_scale[0] = f32(the largest of partial[blocks] / 2688), so that the largest value becomes 6 x 448; 1 where that is 0.
__device__ inline void nvfp4_global_scale(ReduceShared &shared, const float *partial, float *global_scale, int64_t blocks) {
    float largest = 0.0f;
    for (int64_t i = threadIdx.x; i < blocks; i += reduce_threads) largest = fmaxf(largest, partial[i]);
    largest = block_max(shared, largest);
    const float scale = __fdiv_rn(largest, 2688.0f);
    if (threadIdx.x == 0) global_scale[0] = scale == 0.0f ? 1.0f : scale;
}

}  // namespace op
