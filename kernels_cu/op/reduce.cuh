// The largest finite magnitude of an array, and NVFP4's global scale from it.
#pragma once

#include <cstdint>

#include "../ptx/barrier.cuh"
#include "../ptx/target.cuh"
#include "../ptx/warp.cuh"
#include "../tile/format.cuh"

namespace op {

constexpr int reduce_threads = 256;
constexpr int reduce_chunk = 4096;   // consecutive values that a block takes at a time

template <class Element>
constexpr int reduce_vectors =
    reduce_chunk / (reduce_threads * tile::elements_per_chunk<Element>);   // per thread: 4 or 2

// Blocks on a multiprocessor: the fewer, the more bytes each thread has in flight.
template <class Element>
constexpr int reduce_blocks = 2 * ptx::resident_threads / (reduce_threads * reduce_vectors<Element>);

struct ReduceShared {
    float of_warp[reduce_threads / 32];
};

// The largest of the threads' values, which are at least 0, in thread 0.
__device__ inline float block_max(ReduceShared &shared, float value) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) value = fmaxf(value, ptx::shfl_sync_bfly_f32(value, mask));
    if (threadIdx.x % 32 == 0) shared.of_warp[threadIdx.x / 32] = value;
    ptx::bar_sync();   // every warp's maximum is there
#pragma unroll
    for (int warp = 0; warp < reduce_threads / 32; ++warp) value = fmaxf(value, shared.of_warp[warp]);
    return value;
}

// partial[b] = the largest finite magnitude of the chunks b, b + gridDim.x, ... of x[count]; 0 if there is none.
template <class Element>
__device__ inline void amax(ReduceShared &shared, const Element *x, float *partial, int64_t count) {
    constexpr int vectors = reduce_vectors<Element>;
    const uint32_t whole = count / reduce_chunk;   // chunks; the rest is chunk number `whole`
    uint4 next[vectors] = {};
    const auto load = [&](uint32_t chunk) {
        if (chunk >= whole) return;
        const uint4 *source = reinterpret_cast<const uint4 *>(x + size_t(chunk) * reduce_chunk) + threadIdx.x;
#pragma unroll
        for (int i = 0; i < vectors; ++i) next[i] = __ldg(source + i * reduce_threads);
    };
    tile::FiniteMax<Element> largest;
    uint32_t chunk = blockIdx.x;
    load(chunk);
#pragma unroll 2   // saves the copies of registers
    for (; chunk < whole; chunk += gridDim.x) {
        uint4 here[vectors];
#pragma unroll
        for (int i = 0; i < vectors; ++i) here[i] = next[i];
        load(chunk + gridDim.x);   // in flight while this one is reduced
#pragma unroll
        for (const uint4 &vector : here) largest.take(vector);
    }
    if (chunk == whole) {
#pragma unroll 1
        for (int64_t at = int64_t(whole) * reduce_chunk + threadIdx.x; at < count; at += reduce_threads)
            largest.take(float(x[at]));
    }
    const float of_block = block_max(shared, largest.value());
    if (threadIdx.x == 0) partial[blockIdx.x] = of_block;
}

// x / 2688 rounded to nearest, for finite x, without the call of a float division. In f64, 1 / 2688 has a relative
// error of 2^-54, so quotients that f64 holds are exact, also those halfway between two floats. Any other quotient is
// more than 2^-34, relatively, from such a midpoint, since 2688 is 21 times a power of two. So rounding twice gives the
// same float.
__device__ inline float divided_by_2688(float x) { return float(x * (1.0 / 2688.0)); }

// global_scale[0] = f32(the largest of partial[blocks] / 2688), so that the largest value becomes 6 x 448; 1 if it is
// 0.
__device__ inline void nvfp4_global_scale(ReduceShared &shared, const float *partial, float *global_scale,
                                          int64_t blocks) {
    float largest = 0.0f;
    for (int64_t i = threadIdx.x; i < blocks; i += reduce_threads) largest = fmaxf(largest, partial[i]);
    largest = block_max(shared, largest);
    const float scale = divided_by_2688(largest);
    if (threadIdx.x == 0) global_scale[0] = scale == 0.0f ? 1.0f : scale;
}

}   // namespace op
