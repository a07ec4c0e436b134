// Four neighbouring columns of a matrix held by a lane: loads and stores of rows, and codes that pack along the columns.
#pragma once

#include <cstdint>
#include <cstring>

#include "../ptx/warp.cuh"
#include "format.cuh"
#include "narrow.cuh"

namespace tile {

constexpr int lane_columns = 4;

// Where a lane stands: its first column in rows of `cols`, and how many of its columns there are. With `whole` all rows
// begin at multiples of four elements, so that a lane's share of a row is one access.
struct Columns {
    int64_t first, cols;
    int present;
    bool whole;

    __device__ Columns(int64_t first, int64_t cols, bool whole)
        : first(first), cols(cols), present(min(cols - first, int64_t(lane_columns))), whole(whole) {}
};

__device__ inline bool are_whole(int64_t cols) { return cols % lane_columns == 0; }

constexpr int columns_threads = 256;
constexpr int columns_warps = columns_threads / 32;
constexpr int columns_tile = 32 * lane_columns;   // columns of a warp; each warp has its own block of rows

// One matrix of a batch: blocks of `block` rows, and where this lane stands in it.
template <int block>
struct ColumnBlock {
    Columns columns;
    int64_t index;      // of the block of rows
    bool outside;

    __device__ ColumnBlock(int64_t rows, int64_t cols, bool whole)
        : columns((int64_t(blockIdx.x) * 32 + ptx::laneid()) * lane_columns, cols, whole),
          index(int64_t(blockIdx.y) * columns_warps + threadIdx.x / 32),
          outside(index * block >= rows || columns.first >= cols) {}

    __device__ int64_t first_row() const { return index * block; }
};

// A lane's share of a row in memory: four elements of one, two or four bytes, in as many words.
template <int bytes> struct Share4;
template <> struct Share4<1> { using Element = uint8_t; using Vector = uint32_t; };
template <> struct Share4<2> { using Element = uint16_t; using Vector = uint2; };
template <> struct Share4<4> { using Element = uint32_t; using Vector = uint4; };

// Loads this lane's shares of some rows; 0 where there is no column. One test of `whole` for all rows, so that their loads
// go out together.
template <class Element, int count>
__device__ inline void load_rows(const Element *matrix, int64_t first_row, const Columns &at, uint32_t (&words)[count]) {
    constexpr int size = sizeof(Element), rows = count / size;
    using Share = Share4<size>;
    const auto *source = reinterpret_cast<const typename Share::Element *>(matrix) + first_row * at.cols + at.first;
    if (at.whole) {
#pragma unroll
        for (int row = 0; row < rows; ++row) {
            const auto share = __ldg(reinterpret_cast<const typename Share::Vector *>(source + row * at.cols));
            memcpy(words + row * size, &share, sizeof(share));
        }
    } else {
#pragma unroll
        for (int row = 0; row < rows; ++row) {
#pragma unroll
            for (int i = 0; i < size; ++i) words[row * size + i] = 0;
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (i < at.present) words[row * size + i * size / 4] |= uint32_t(source[row * at.cols + i]) << (8 * (i * size % 4));
        }
    }
}

// The inverse.
template <class Element, int count>
__device__ inline void store_rows(Element *matrix, int64_t first_row, const Columns &at, const uint32_t (&words)[count]) {
    constexpr int size = sizeof(Element), rows = count / size;
    using Share = Share4<size>;
    auto *target = reinterpret_cast<typename Share::Element *>(matrix) + first_row * at.cols + at.first;
    if (at.whole) {
#pragma unroll
        for (int row = 0; row < rows; ++row) {
            typename Share::Vector share;
            memcpy(&share, words + row * size, sizeof(share));
            *reinterpret_cast<typename Share::Vector *>(target + row * at.cols) = share;
        }
    } else {
#pragma unroll
        for (int row = 0; row < rows; ++row)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (i < at.present) target[row * at.cols + i] = words[row * size + i * size / 4] >> (8 * (i * size % 4));
    }
}

// The floats of a lane's share of a row. Exact.
__device__ inline void unpack_four(const uint32_t *words, float (&values)[4], float) {
    unpack(uint4{words[0], words[1], words[2], words[3]}, values, float{});
}

template <class Element>
__device__ inline void unpack_four(const uint32_t *words, float (&values)[4], Element) {
    float eight[8];
    unpack(uint4{words[0], words[1], 0, 0}, eight, Element{});
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = eight[i];
}

// The inverse, rounded to nearest, ties to even.
__device__ inline void pack_four(const float (&values)[4], uint32_t *words, float) {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = __float_as_uint(values[i]);
}

template <class Element>
__device__ inline void pack_four(const float (&values)[4], uint32_t *words, Element) {
    const float eight[8] = {values[0], values[1], values[2], values[3]};
    const uint4 packed = pack(eight, Element{});
    words[0] = packed.x, words[1] = packed.y;
}

// The values of some rows as floats, from and to memory.
template <class Element, int rows>
__device__ inline void load_values(const Element *matrix, int64_t first_row, const Columns &at, float (&values)[rows][4]) {
    uint32_t words[rows * sizeof(Element)];
    load_rows(matrix, first_row, at, words);
#pragma unroll
    for (int row = 0; row < rows; ++row) unpack_four(words + row * sizeof(Element), values[row], Element{});
}

template <class Element, int rows>
__device__ inline void store_values(Element *matrix, int64_t first_row, const Columns &at, const float (&values)[rows][4]) {
    uint32_t words[rows * sizeof(Element)];
#pragma unroll
    for (int row = 0; row < rows; ++row) pack_four(values[row], words + row * sizeof(Element), Element{});
    store_rows(matrix, first_row, at, words);
}

constexpr int group_rows = 4;   // of a column, whose codes fill `bits` / 2 bytes

// The codes of four rows by four columns: word b holds byte b of every column's packed codes, column i in byte i.
template <class Format>
__device__ inline void encode_group(const float (&v)[group_rows][4], uint32_t *words) {
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
__device__ inline void decode_group(const uint32_t *words, float (&v)[group_rows][4]) {
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
