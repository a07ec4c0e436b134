// Kernels that the lessons set beside shipped ones; docs/lessons.py runs them. lessons.ptx is made of this file by
// nvcc -ptx -arch=compute_120f -std=c++17, version 13.0.
#include <cstdint>

// The MX scale byte of 32 finite values, rule "floor": e2m1's largest exponent is 2.
__device__ uint32_t scale_of(float amax) {
    const uint32_t exponent = __float_as_uint(amax) >> 23;
    return exponent > 2 ? exponent - 2 : 0;
}

// 2^(127 - scale), what values are multiplied by.
__device__ float factor_of(uint32_t scale) { return __uint_as_float((254 - scale) << 23); }

// Two e2m1 codes in a byte, `low` in the low nibble.
__device__ uint32_t codes_of(float low, float high) {
    uint32_t byte;
    asm("{.reg .b8 pair; cvt.rn.satfinite.e2m1x2.f32 pair, %2, %1; mov.b32 %0, {pair, pair, pair, pair};}"
        : "=r"(byte)
        : "f"(low), "f"(high));
    return byte & 0xff;
}

// One thread to a block of 32 values, as one writes it first. x [blocks, 32], codes [blocks, 16], scales [blocks].
extern "C" __global__ void quantize_by_thread(const float *x, uint8_t *codes, uint8_t *scales, int blocks) {
    const int block = blockIdx.x * blockDim.x + threadIdx.x;
    if (block >= blocks) return;
    float amax = 0.0f;
#pragma unroll 1
    for (int i = 0; i < 32; ++i) amax = fmaxf(amax, fabsf(x[32 * block + i]));
    const uint32_t scale = scale_of(amax);
    scales[block] = scale;
#pragma unroll 1
    for (int i = 0; i < 32; i += 2)
        codes[16 * block + i / 2] =
            codes_of(x[32 * block + i] * factor_of(scale), x[32 * block + i + 1] * factor_of(scale));
}

// One warp to a block of 32 values: a lane has one of them.
extern "C" __global__ void quantize_by_warp(const float *x, uint8_t *codes, uint8_t *scales, int blocks) {
    const int block = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (block >= blocks) return;
    const float value = x[32 * block + lane];
    float amax = fabsf(value);
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        amax = fmaxf(amax, __shfl_xor_sync(0xffffffff, amax, distance));
    const uint32_t scale = scale_of(amax);
    const float scaled = value * factor_of(scale), next = __shfl_down_sync(0xffffffff, scaled, 1);
    if (lane % 2 == 0) codes[16 * block + lane / 2] = codes_of(scaled, next);
    if (lane == 0) scales[block] = scale;
}

// transpose_tiled without its padding: 32 floats to a row, so that a column of the tile stands in one bank.
// y [cols, rows] from x [rows, cols], both multiples of 32; blocks of 32 x 8 threads.
extern "C" __global__ void transpose_unpadded(const float *x, float *y, int rows, int cols) {
    __shared__ float tile[32][32];
    const int first_row = blockIdx.y * 32, first_col = blockIdx.x * 32;
    for (int i = threadIdx.y; i < 32; i += 8)
        tile[i][threadIdx.x] = x[size_t(first_row + i) * cols + first_col + threadIdx.x];
    __syncthreads();   // the whole tile is written before any of it is read across
    for (int i = threadIdx.y; i < 32; i += 8)
        y[size_t(first_col + i) * rows + first_row + threadIdx.x] = tile[threadIdx.x][i];
}

// The softmax of rows of scores, one warp to a row, rounded to bfloat16: weights [rows, keys] from scores [rows, keys].
extern "C" __global__ void softmax_rows(const float *scores, uint16_t *weights, int rows, int keys) {
    const int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    const float *mine = scores + size_t(row) * keys;
    float largest = __int_as_float(0xff800000), sum = 0.0f;
    for (int key = lane; key < keys; key += 32) largest = fmaxf(largest, mine[key]);
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, distance));
    for (int key = lane; key < keys; key += 32) sum += exp2f((mine[key] - largest) * 1.4426950408889634f);
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffff, sum, distance);
    for (int key = lane; key < keys; key += 32) {
        const float weight = exp2f((mine[key] - largest) * 1.4426950408889634f) / sum;
        uint16_t rounded;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded) : "f"(weight));
        weights[size_t(row) * keys + key] = rounded;
    }
}
