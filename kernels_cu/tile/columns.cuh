// A lane holds four consecutive columns of a matrix: loads and stores of rows, and codes that are packed along the
// columns.
#pragma once

#include <cstdint>

#include "../ptx/warp.cuh"
#include "format.cuh"
#include "narrow.cuh"

namespace tile {

constexpr int lane_columns = 4;

// The columns of a lane: the first one in rows of `cols`, and how many exist. If `whole`, all rows begin at multiples
// of four elements, and a lane's share of a row is one access.
template <bool whole_>
struct Columns {
    static constexpr bool whole = whole_;
    int64_t first, cols;
    int present;

    __device__ Columns(int64_t first, int64_t cols)
        : first(first), cols(cols), present(min(cols - first, int64_t(lane_columns))) {}
};

constexpr int columns_threads = 128;
constexpr int columns_warps = columns_threads / 32;
constexpr int columns_tile = 32 * lane_columns;   // columns of a warp; each warp has its own block of rows

// One matrix of a batch: blocks of `block` rows, and the place of this lane.
template <int block, bool whole>
struct ColumnBlock {
    Columns<whole> columns;
    int64_t index;   // of the block of rows
    bool outside;

    __device__ ColumnBlock(int64_t rows, int64_t cols)
        : columns((int64_t(blockIdx.x) * 32 + ptx::laneid()) * lane_columns, cols),
          index(int64_t(blockIdx.y) * columns_warps + threadIdx.x / 32),
          outside(index * block >= rows || columns.first >= cols) {}

    __device__ int64_t first_row() const { return index * block; }
};

// A lane's values of one row: four floats, or two pairs of 16-bit elements.
template <class Element>
struct RowShare {
    static constexpr int words = sizeof(Element);
    uint32_t word[words];

    // Missing columns become 0.
    template <bool whole>
    __device__ void load(const Element *matrix, int64_t row, const Columns<whole> &at) {
        const Element *source = matrix + row * at.cols + at.first;
        if constexpr (!whole) {
#pragma unroll
            for (uint32_t &one : word) one = 0;
#pragma unroll
            for (int i = 0; i < lane_columns; ++i)
                if (i < at.present) put(i, source[i]);
        } else if constexpr (words == 4) {
            const uint4 loaded = __ldg(reinterpret_cast<const uint4 *>(source));
            word[0] = loaded.x, word[1] = loaded.y, word[2] = loaded.z, word[3] = loaded.w;
        } else {
            const uint2 loaded = __ldg(reinterpret_cast<const uint2 *>(source));
            word[0] = loaded.x, word[1] = loaded.y;
        }
    }

    __device__ void put(int column, Element value) {
        if constexpr (words == 4) word[column] = __float_as_uint(value);
        else word[column / 2] |= uint32_t(*reinterpret_cast<const uint16_t *>(&value)) << (16 * (column % 2));
    }
};

// The largest magnitude of each column of some rows; NaN if any value is.
template <int rows>
__device__ inline void amax_of(const RowShare<float> (&share)[rows], float (&amax)[4]) {
#pragma unroll
    for (int column = 0; column < 4; ++column) {
        amax[column] = 0.0f;
#pragma unroll
        for (int row = 0; row < rows; ++row)
            amax[column] = ptx::max_nan_f32(amax[column], fabsf(__uint_as_float(share[row].word[column])));
    }
}

template <int rows, class Element>
__device__ inline void amax_of(const RowShare<Element> (&share)[rows], float (&amax)[4]) {
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
        uint32_t largest = 0;
#pragma unroll
        for (int row = 0; row < rows; ++row)
            largest = max_nan(largest, magnitudes(share[row].word[pair], Element{}), Element{});
        const float2 both = unpack_pair(largest, Element{});
        amax[2 * pair] = both.x;
        amax[2 * pair + 1] = both.y;
    }
}

// Eight rows of one column, in order, as floats; of a 16-bit element also as pairs.
template <class Element>
__device__ inline void column_pairs(const RowShare<Element> *rows, int column, uint32_t (&pairs)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
        pairs[i] =
            __byte_perm(rows[2 * i].word[column / 2], rows[2 * i + 1].word[column / 2], column % 2 ? 0x7632 : 0x5410);
}

__device__ inline void column_values(const RowShare<float> *rows, int column, float (&values)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = __uint_as_float(rows[i].word[column]);
}

template <class Element>
__device__ inline void column_values(const RowShare<Element> *rows, int column, float (&values)[8]) {
    uint32_t pairs[4];
    column_pairs(rows, column, pairs);
    unpack(uint4{pairs[0], pairs[1], pairs[2], pairs[3]}, values, Element{});
}

template <class Element, bool whole>
__device__ inline void store_row(Element *matrix, int64_t row, const Columns<whole> &at, const float (&values)[4]) {
    Element *target = matrix + row * at.cols + at.first;
    if constexpr (!whole) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (i < at.present) target[i] = Element(values[i]);
    } else if constexpr (sizeof(Element) == 4) {
        store(target, pack(values, Element{}));
    } else {
        const float eight[8] = {values[0], values[1], values[2], values[3]};
        const uint4 packed = pack(eight, Element{});
        store(target, uint2{packed.x, packed.y});
    }
}

// The same for bytes: byte i of a word belongs to column i.
template <bool whole>
__device__ inline uint32_t load_bytes(const uint8_t *matrix, int64_t row, const Columns<whole> &at) {
    const uint8_t *source = matrix + row * at.cols + at.first;
    uint32_t word = 0;
    if constexpr (whole) {
        word = __ldg(reinterpret_cast<const uint32_t *>(source));
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (i < at.present) word |= uint32_t(source[i]) << (8 * i);
    }
    return word;
}

template <bool whole>
__device__ inline void store_bytes(uint8_t *matrix, int64_t row, const Columns<whole> &at, uint32_t word) {
    uint8_t *target = matrix + row * at.cols + at.first;
    if constexpr (whole) {
        *reinterpret_cast<uint32_t *>(target) = word;
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (i < at.present) target[i] = word >> (8 * i);
    }
}

constexpr int group_rows = 8;   // of a column, whose codes fill as many bytes as a code has bits

// Word b of `words` holds byte b of four columns, column i in byte i; and back. With 6-bit codes, the last two bytes of
// the second word are unused.
__device__ inline void transpose_bytes(const uint32_t (&from)[4], uint32_t (&to)[4]) {
    const uint32_t low01 = __byte_perm(from[0], from[1], 0x5140), low23 = __byte_perm(from[2], from[3], 0x5140);
    const uint32_t high01 = __byte_perm(from[0], from[1], 0x7362), high23 = __byte_perm(from[2], from[3], 0x7362);
    to[0] = __byte_perm(low01, low23, 0x5410);
    to[1] = __byte_perm(low01, low23, 0x7632);
    to[2] = __byte_perm(high01, high23, 0x5410);
    to[3] = __byte_perm(high01, high23, 0x7632);
}

// The codes of eight rows of four columns as bytes to store, row of bytes by row.
template <int bits>
__device__ inline void rows_of_bytes(const Codes<bits> (&columns)[4], uint32_t (&bytes)[bits]) {
#pragma unroll
    for (int i = 0; i < Codes<bits>::words; ++i) {
        uint32_t rows[4];
        transpose_bytes({columns[0].word[i], columns[1].word[i], columns[2].word[i], columns[3].word[i]}, rows);
#pragma unroll
        for (int j = 0; j < 4 && 4 * i + j < bits; ++j) bytes[4 * i + j] = rows[j];
    }
}

template <int bits>
__device__ inline void columns_of_codes(const uint32_t (&bytes)[bits], Codes<bits> (&columns)[4]) {
#pragma unroll
    for (int i = 0; i < Codes<bits>::words; ++i) {
        uint32_t rows[4] = {}, words[4];
#pragma unroll
        for (int j = 0; j < 4 && 4 * i + j < bits; ++j) rows[j] = bytes[4 * i + j];
        transpose_bytes(rows, words);
#pragma unroll
        for (int column = 0; column < 4; ++column) columns[column].word[i] = words[column];
    }
}

}   // namespace tile
