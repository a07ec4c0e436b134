// Four neighbouring columns of a matrix held by a lane: loads and stores of rows, and codes that pack along the columns.
#pragma once

#include <cstdint>

#include "../ptx/warp.cuh"
#include "format.cuh"
#include "narrow.cuh"

namespace tile {

constexpr int lane_columns = 4;

// Where a lane stands: its first column in rows of `cols`, and how many of its columns there are. With `whole` all rows
// begin at multiples of four elements, so that a lane's share of a row is one access.
template <bool whole_>
struct Columns {
    static constexpr bool whole = whole_;
    int64_t first, cols;
    int present;

    __device__ Columns(int64_t first, int64_t cols) : first(first), cols(cols), present(min(cols - first, int64_t(lane_columns))) {}
};

constexpr int columns_threads = 256;
constexpr int columns_warps = columns_threads / 32;
constexpr int columns_tile = 32 * lane_columns;   // columns of a warp; each warp has its own block of rows

// One matrix of a batch: blocks of `block` rows, and where this lane stands in it.
template <int block, bool whole>
struct ColumnBlock {
    Columns<whole> columns;
    int64_t index;      // of the block of rows
    bool outside;

    __device__ ColumnBlock(int64_t rows, int64_t cols)
        : columns((int64_t(blockIdx.x) * 32 + ptx::laneid()) * lane_columns, cols),
          index(int64_t(blockIdx.y) * columns_warps + threadIdx.x / 32),
          outside(index * block >= rows || columns.first >= cols) {}

    __device__ int64_t first_row() const { return index * block; }
};

__device__ inline void load_four(const float *source, float (&values)[4]) {
    unpack(__ldg(reinterpret_cast<const uint4 *>(source)), values, float{});
}

template <class Element>
__device__ inline void load_four(const Element *source, float (&values)[4]) {
    const uint2 half = __ldg(reinterpret_cast<const uint2 *>(source));
    float eight[8];
    unpack(uint4{half.x, half.y, 0, 0}, eight, Element{});
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = eight[i];
}

__device__ inline void store_four(float *target, const float (&values)[4]) {
    *reinterpret_cast<uint4 *>(target) = pack(values, float{});
}

template <class Element>
__device__ inline void store_four(Element *target, const float (&values)[4]) {
    const float eight[8] = {values[0], values[1], values[2], values[3]};
    const uint4 packed = pack(eight, Element{});
    *reinterpret_cast<uint2 *>(target) = {packed.x, packed.y};
}

// This lane's values of one row; 0 where there is no column.
template <class Element, bool whole>
__device__ inline void load_row(const Element *matrix, int64_t row, const Columns<whole> &at, float (&values)[4]) {
    const Element *source = matrix + row * at.cols + at.first;
    if constexpr (whole) {
        load_four(source, values);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) values[i] = i < at.present ? float(source[i]) : 0.0f;
    }
}

template <class Element, bool whole>
__device__ inline void store_row(Element *matrix, int64_t row, const Columns<whole> &at, const float (&values)[4]) {
    Element *target = matrix + row * at.cols + at.first;
    if constexpr (whole) {
        store_four(target, values);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (i < at.present) target[i] = Element(values[i]);
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

constexpr int group_rows = 4;   // of a column, whose codes fill `bits` / 2 bytes

// The codes of four rows by four columns: word b holds byte b of every column's packed codes, column i in byte i.
template <class Format>
__device__ inline void encode_group(const float (&v)[group_rows][4], uint32_t (&words)[Format::bits / 2]) {
    if constexpr (Format::bits == 4) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {   // two rows make a byte of each column
            const float pairs[8] = {v[2 * i][0], v[2 * i + 1][0], v[2 * i][1], v[2 * i + 1][1],
                                    v[2 * i][2], v[2 * i + 1][2], v[2 * i][3], v[2 * i + 1][3]};
            words[i] = Format::encode(pairs).word[0];
        }
    } else if constexpr (Format::bits == 8) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float rows[8] = {v[2 * i][0],     v[2 * i][1],     v[2 * i][2],     v[2 * i][3],
                                   v[2 * i + 1][0], v[2 * i + 1][1], v[2 * i + 1][2], v[2 * i + 1][3]};
            const Codes<8> codes = Format::encode(rows);
            words[2 * i] = codes.word[0];
            words[2 * i + 1] = codes.word[1];
        }
    } else {
        uint32_t columns[4];   // 24 bits each
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float two[8] = {v[0][2 * i],     v[1][2 * i],     v[2][2 * i],     v[3][2 * i],
                                  v[0][2 * i + 1], v[1][2 * i + 1], v[2][2 * i + 1], v[3][2 * i + 1]};
            const Codes<6> codes = Format::encode(two);
            columns[2 * i] = codes.word[0];
            columns[2 * i + 1] = codes.word[0] >> 24 | codes.word[1] << 8;
        }
#pragma unroll
        for (int byte = 0; byte < 3; ++byte) {
            const uint32_t selector = 0x0040u + 0x0011u * byte;   // byte `byte` of both sources
            words[byte] = __byte_perm(__byte_perm(columns[0], columns[1], selector), __byte_perm(columns[2], columns[3], selector), 0x5410);
        }
    }
}

// The inverse.
template <class Format>
__device__ inline void decode_group(const uint32_t (&words)[Format::bits / 2], float (&v)[group_rows][4]) {
    float eight[8];
    if constexpr (Format::bits == 4) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            Format::decode({{words[i]}}, eight);
#pragma unroll
            for (int j = 0; j < 8; ++j) v[2 * i + j % 2][j / 2] = eight[j];
        }
    } else if constexpr (Format::bits == 8) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            Format::decode({{words[2 * i], words[2 * i + 1]}}, eight);
#pragma unroll
            for (int j = 0; j < 8; ++j) v[2 * i + j / 4][j % 4] = eight[j];
        }
    } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            uint32_t columns[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const uint32_t byte = 2 * i + j;   // of each word
                columns[j] = __byte_perm(__byte_perm(words[0], words[1], byte | (4 + byte) << 4), words[2], 0x7010 + ((4 + byte) << 8)) & 0xffffffu;
            }
            Format::decode({{columns[0] | columns[1] << 24, columns[1] >> 8}}, eight);
#pragma unroll
            for (int j = 0; j < 8; ++j) v[j % 4][2 * i + j / 4] = eight[j];
        }
    }
}

}  // namespace tile
