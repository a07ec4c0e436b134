// Bytes copied at any strides, sixteen at a time if both sides are contiguous.
#pragma once

#include <cstdint>

#include "cast.cuh"

namespace op {

constexpr int copy_threads = 256;
constexpr int copy_run = 16;   // neighbouring bytes of a thread
constexpr int copy_tile = copy_threads * copy_run;

// Copies `count` bytes in words of one size, of which both addresses and the count are multiples.
template <class Word>
__device__ inline void move_words(const uint8_t *source, uint8_t *target, int count) {
#pragma unroll 1
    for (int i = 0; i < count; i += sizeof(Word))
        *reinterpret_cast<Word *>(target + i) = *reinterpret_cast<const Word *>(source + i);
}

// y[b][h][rows][width] = x[b][h][rows][width], byte for byte. x: source, y: target, strides in bytes; they share no
// byte. The grid's y and z are heads and batch. Its x is any number of blocks: each takes every gridDim.x-th run.
__device__ inline void copy_rows(const Strided<const uint8_t> &x, const Strided<uint8_t> &y, int64_t rows,
                                 int64_t width) {
    const int64_t runs = (width + copy_run - 1) / copy_run;
    for (int64_t item = int64_t(blockIdx.x) * copy_threads + threadIdx.x; item < rows * runs;
         item += int64_t(gridDim.x) * copy_threads) {
        const int64_t row = item / runs, first = item % runs * copy_run;
        const uint8_t *source = x.at(blockIdx.z, blockIdx.y, row, first);
        uint8_t *target = y.at(blockIdx.z, blockIdx.y, row, first);
        const int count = min(width - first, int64_t(copy_run));
        const uint64_t together =
            reinterpret_cast<uintptr_t>(source) | reinterpret_cast<uintptr_t>(target) | uint64_t(count);
        if (x.column != 1 || y.column != 1) {
#pragma unroll 1
            for (int i = 0; i < count; ++i) target[i * y.column] = source[i * x.column];
        } else if (together % 16 == 0) {
            move_words<uint4>(source, target, count);
        } else if (together % 8 == 0) {
            move_words<uint64_t>(source, target, count);
        } else if (together % 4 == 0) {
            move_words<uint32_t>(source, target, count);
        } else if (together % 2 == 0) {
            move_words<uint16_t>(source, target, count);
        } else {
            move_words<uint8_t>(source, target, count);
        }
    }
}

}   // namespace op
