// Rows converted to another type and cut or padded with zeros to another width, at any strides.
#pragma once

#include <cstdint>

#include "../tile/format.cuh"

namespace op {

constexpr int cast_threads = 256;
constexpr int cast_values = 8;   // neighbouring columns of a thread
constexpr int cast_tile = cast_threads * cast_values;

// Elements [batch][head][row][column] at any strides, counted in elements.
template <class Element>
struct Strided {
    Element *data;
    int64_t batch, head, row, column;

    __device__ Element *at(int64_t b, int64_t h, int64_t r, int64_t c) const {
        return data + b * batch + h * head + r * row + c * column;
    }

    // Whether `bytes` bytes at `first` can be moved by one instruction.
    __device__ bool is_whole(const Element *first, int bytes) const {
        return column == 1 && reinterpret_cast<uintptr_t>(first) % bytes == 0;
    }
};

template <class Element>
__device__ inline void load_values(const Element *source, float (&values)[8]) {
    constexpr int some = tile::elements_per_chunk<Element>;
#pragma unroll
    for (int i = 0; i < 8 / some; ++i) {
        float of_chunk[some];
        tile::unpack(__ldg(reinterpret_cast<const uint4 *>(source) + i), of_chunk, Element{});
#pragma unroll
        for (int j = 0; j < some; ++j) values[i * some + j] = of_chunk[j];
    }
}

__device__ inline void store_values(float *target, const float (&values)[8]) {
    reinterpret_cast<float4 *>(target)[0] = {values[0], values[1], values[2], values[3]};
    reinterpret_cast<float4 *>(target)[1] = {values[4], values[5], values[6], values[7]};
}

template <class Element>
__device__ inline void store_values(Element *target, const float (&values)[8]) {
    *reinterpret_cast<uint4 *>(target) = tile::pack(values, Element{});
}

// y[b][h][rows][width] = x[b][h][rows][cols], rounded to nearest even; columns from `cols` on are zeros. Does nothing
// if y is null. The grid's y and z are heads and batch. Its x is any number of blocks: each takes every gridDim.x-th
// piece of eight columns per thread.
template <class From, class To>
__device__ inline void cast_to(const Strided<const From> &x, const Strided<To> &y, int64_t rows, int64_t cols,
                               int64_t width) {
    if (!y.data) return;
    const int64_t chunks = (width + cast_values - 1) / cast_values;
    for (int64_t item = int64_t(blockIdx.x) * cast_threads + threadIdx.x; item < rows * chunks;
         item += int64_t(gridDim.x) * cast_threads) {
        const int64_t row = item / chunks, first = item % chunks * cast_values;
        const From *source = x.at(blockIdx.z, blockIdx.y, row, first);
        float values[cast_values];
        if (first + cast_values <= cols && x.is_whole(source, 16)) {
            load_values(source, values);
        } else {
#pragma unroll
            for (int i = 0; i < cast_values; ++i) values[i] = first + i < cols ? float(source[i * x.column]) : 0.0f;
        }
        To *target = y.at(blockIdx.z, blockIdx.y, row, first);
        if (first + cast_values <= width && y.is_whole(target, 16)) {
            store_values(target, values);
        } else {
#pragma unroll
            for (int i = 0; i < cast_values; ++i)
                if (first + i < width) target[i * y.column] = To(values[i]);
        }
    }
}

}   // namespace op
