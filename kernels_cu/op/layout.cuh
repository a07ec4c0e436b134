// Moving bytes without changing them: a constant, rows of another length, and scales in the tiles that cuBLAS wants.
#pragma once

#include <cstdint>

namespace op {

constexpr int layout_threads = 256;
constexpr int layout_tile = 4 * layout_threads;   // bytes of a block of threads: a word to each

__device__ inline size_t first_byte() { return (size_t(blockIdx.x) * layout_threads + threadIdx.x) * 4; }

// Bytes at .. at + 3 of an array of `count`, from a function of the index; at is a multiple of 4.
template <class Source>
__device__ inline void store_bytes(uint8_t *target, size_t at, size_t count, Source &&source) {
    uint32_t word = 0;
    for (int i = 0; i < 4; ++i)
        if (at + i < count) word |= uint32_t(source(at + i)) << (8 * i);
    if (at + 4 <= count) {
        *reinterpret_cast<uint32_t *>(target + at) = word;
    } else {
        for (int i = 0; at + i < count; ++i) target[at + i] = word >> (8 * i);
    }
}

__device__ inline void fill(float *x, float value, size_t count) {
    const size_t i = size_t(blockIdx.x) * layout_threads + threadIdx.x;
    if (i < count) x[i] = value;
}

// Rows of target_bytes from rows of source_bytes: cut, or filled up with zeros.
__device__ inline void pad_last(const uint8_t *x, uint8_t *y, size_t rows, size_t source_bytes, size_t target_bytes) {
    const size_t count = rows * target_bytes;
    store_bytes(y, first_byte(), count, [&](size_t i) {
        const size_t row = i / target_bytes, column = i % target_bytes;
        return column < source_bytes ? x[row * source_bytes + column] : uint8_t(0);
    });
}

// y[rows, count] = the bytes of x[rows, width] at places[count] of each row.
__device__ inline void gather_bytes(const uint8_t *x, const int *places, uint8_t *y, size_t rows, size_t width, size_t count) {
    store_bytes(y, first_byte(), rows * count, [&](size_t i) { return x[i / count * width + places[i % count]]; });
}

// A matrix of scales [rows, blocks] stands in tiles of 128 rows x 4 blocks, 512 bytes each, the tiles of a row of tiles next
// to each other; row r and block b of a tile are byte (r % 32) 16 + (r / 32) 4 + b. Source: cuBLAS, "1D block scaling".
// Row `outer` cols + col of that matrix is scales[outer][.][col].
struct ScaleTiles {
    size_t outer, blocks, cols;

    __device__ size_t row_tiles() const { return (blocks + 3) / 4; }

    // Scale i of scales[outer][blocks][cols] in the tiles.
    __device__ size_t offset(size_t i) const {
        const size_t row = i / (blocks * cols) * cols + i % cols, block = i / cols % blocks;
        return (row / 128 * row_tiles() + block / 4) * 512 + row % 32 * 16 + row % 128 / 32 * 4 + block % 4;
    }

    // The scale at a byte of the tiles; 0 outside the matrix.
    __device__ uint8_t at(const uint8_t *scales, size_t offset) const {
        const size_t tile = offset / 512, inside = offset % 512;
        const size_t row = tile / row_tiles() * 128 + inside / 4 % 4 * 32 + inside / 16;
        const size_t block = tile % row_tiles() * 4 + inside % 4;
        if (row >= outer * cols || block >= blocks) return 0;
        return scales[(row / cols * blocks + block) * cols + row % cols];
    }
};

__device__ inline void swizzle_scales(const uint8_t *scales, uint8_t *swizzled, ScaleTiles tiles, size_t bytes) {
    store_bytes(swizzled, first_byte(), bytes, [&](size_t offset) { return tiles.at(scales, offset); });
}

__device__ inline void unswizzle_scales(const uint8_t *swizzled, uint8_t *scales, size_t bytes, ScaleTiles tiles) {
    store_bytes(scales, first_byte(), tiles.outer * tiles.blocks * tiles.cols, [&](size_t i) {
        const size_t offset = tiles.offset(i);
        return offset < bytes ? swizzled[offset] : uint8_t(0);
    });
}

}  // namespace op
