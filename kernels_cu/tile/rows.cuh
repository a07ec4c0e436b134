// Rows of a matrix at any stride, from any address, loaded eight values at a time.
#pragma once

#include <cstdint>

#include "format.cuh"

namespace tile {

// Eight values of a row, unconverted.
template <class Element>
struct Eight {
    static constexpr int chunks = sizeof(Element) / 2;
    uint4 chunk[chunks];

    // Loads all of them from a 16-byte aligned address.
    __device__ void load(const Element *source) {
#pragma unroll
        for (int i = 0; i < chunks; ++i) chunk[i] = __ldg(reinterpret_cast<const uint4 *>(source) + i);
    }

    // Loads the first `count` from any address; zeros behind them.
    __device__ void load(const Element *source, int count) {
        uint32_t words[4 * chunks] = {};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (i >= count) continue;
            if constexpr (chunks == 2) words[i] = __ldg(reinterpret_cast<const uint32_t *>(source) + i);
            else words[i / 2] |= uint32_t(__ldg(reinterpret_cast<const uint16_t *>(source) + i)) << (16 * (i % 2));
        }
#pragma unroll
        for (int i = 0; i < chunks; ++i)
            chunk[i] = {words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]};
    }

    __device__ void clear() {
#pragma unroll
        for (uint4 &one : chunk) one = {};
    }

    __device__ void unpack(float (&values)[8]) const {
        if constexpr (chunks == 2) {
            float low[4], high[4];
            tile::unpack(chunk[0], low, Element{});
            tile::unpack(chunk[1], high, Element{});
#pragma unroll
            for (int i = 0; i < 8; ++i) values[i] = i < 4 ? low[i] : high[i - 4];
        } else {
            tile::unpack(chunk[0], values, Element{});
        }
    }
};

// The source rows of a tile: `rows` rows of `cols` values, `stride` elements apart. `rows` may be 0 or less, or more
// than the tile has. The rest of the tile is zeros.
template <class Element>
struct Rows {
    const Element *first;
    int64_t stride;
    int rows, cols;
    bool aligned;   // whether all eights of values are complete and 16-byte aligned

    __device__ Rows(const Element *first, int64_t stride, int rows, int cols)
        : first(first), stride(stride), rows(rows), cols(cols),
          aligned(cols % 8 == 0 && reinterpret_cast<uintptr_t>(first) % 16 == 0 && stride * sizeof(Element) % 16 == 0) {
    }

    __device__ bool holds(int row, int column) const { return row < rows && column < cols; }
    __device__ const Element *at(int row, int column) const { return first + row * stride + column; }

    // Loads eight values of each of `count` rows, from `row` on, `step` apart. All loads are issued before the first
    // value is used.
    template <int count>
    __device__ void load(Eight<Element> (&values)[count], int row, int step, int column) const {
        if (aligned) {
#pragma unroll
            for (int i = 0; i < count; ++i) {
                if (holds(row + i * step, column)) values[i].load(at(row + i * step, column));
                else values[i].clear();
            }
        } else {
#pragma unroll
            for (int i = 0; i < count; ++i)
                values[i].load(at(row + i * step, column), row + i * step < rows ? cols - column : 0);
        }
    }
};

}   // namespace tile
