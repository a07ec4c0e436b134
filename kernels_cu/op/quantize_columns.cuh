// Quantization to the MX formats and NVFP4 and back, of blocks that run down the columns of matrices.
#pragma once

#include <cstdint>

#include "../tile/columns.cuh"
#include "../tile/format.cuh"
#include "../tile/narrow.cuh"
#include "../tile/scale.cuh"

namespace op {

using tile::columns_threads;
using tile::columns_tile;
using tile::columns_warps;

// Calls body(whole) with tile::are_whole(cols) as a compile-time constant: two copies of the body, in each of which loads,
// arithmetic and stores of different rows mix freely. For the quantizers, which load all before they compute, one copy with
// a test before the loads and one before the stores is as fast, and half the code.
template <class Body>
__device__ inline void with_whole(int64_t cols, Body &&body) {
    if (tile::are_whole(cols)) body(std::true_type{});
    else body(std::false_type{});
}

// Codes [rows * bits / 8, cols] and scales [rows / 32, cols] of x[rows, cols] in an MX format; rows is a multiple of 32.
template <class Format, class Element>
__device__ inline void quantize_mx_columns(const Element *x, uint8_t *codes, uint8_t *scales, int64_t rows, int64_t cols,
                                           tile::ScaleRule rule) {
    const tile::ColumnBlock<tile::mx_block> block(rows, cols, tile::are_whole(cols));
    if (block.outside) return;
    float values[tile::mx_block][4], reciprocal[4];
    tile::load_values(x, block.first_row(), block.columns, values);

    uint32_t scale_bytes = 0, finite = 0;   // a byte to a column; of ones where its block is finite
#pragma unroll
    for (int column = 0; column < 4; ++column) {
        float amax = 0.0f;
#pragma unroll
        for (int row = 0; row < tile::mx_block; ++row) amax = ptx::max_nan_f32(amax, fabsf(values[row][column]));
        const uint32_t scale = tile::mx_scale<Format>(amax, rule);
        scale_bytes |= scale << (8 * column);
        if (scale != tile::ue8m0_nan) finite |= 0xffu << (8 * column);
        reciprocal[column] = tile::ue8m0_reciprocal(scale);
    }
    tile::store_rows<uint8_t, 1>(scales, block.index, block.columns, {scale_bytes});

    constexpr int code_rows = tile::mx_block * Format::bits / 8;
    uint32_t words[code_rows];
#pragma unroll
    for (int group = 0; group < tile::mx_block / tile::group_rows; ++group) {
        float scaled[tile::group_rows][4];
#pragma unroll
        for (int row = 0; row < tile::group_rows; ++row)
#pragma unroll
            for (int column = 0; column < 4; ++column)
                scaled[row][column] = values[group * tile::group_rows + row][column] * reciprocal[column];
        tile::encode_group<Format>(scaled, words + group * (Format::bits / 2));
    }
#pragma unroll
    for (uint32_t &word : words) word &= finite;
    tile::store_rows(codes, block.index * code_rows, block.columns, words);
}

// x[rows, cols] of such codes and scales.
template <class Format, class Element>
__device__ inline void dequantize_mx_columns(const uint8_t *codes, const uint8_t *scales, Element *x, int64_t rows, int64_t cols, bool whole) {
    const tile::ColumnBlock<tile::mx_block> block(rows, cols, whole);
    if (block.outside) return;
    uint32_t scale_bytes[1];
    tile::load_rows(scales, block.index, block.columns, scale_bytes);
    float scale[4];
#pragma unroll
    for (int column = 0; column < 4; ++column) scale[column] = ptx::cvt_f32_ue8m0(scale_bytes[0] >> (8 * column) & 0xffu);
#pragma unroll
    for (int group = 0; group < tile::mx_block / tile::group_rows; ++group) {
        uint32_t words[Format::bits / 2];
        tile::load_rows(codes, block.first_row() * Format::bits / 8 + group * (Format::bits / 2), block.columns, words);
        float values[tile::group_rows][4];
        tile::decode_group<Format>(words, values);
#pragma unroll
        for (int row = 0; row < tile::group_rows; ++row)
#pragma unroll
            for (int column = 0; column < 4; ++column) values[row][column] *= scale[column];
        tile::store_values(x, block.first_row() + group * tile::group_rows, block.columns, values);
    }
}

// Codes [rows / 2, cols] and ue4m3 scales [rows / 16, cols] of x[rows, cols] in NVFP4; rows is a multiple of 16.
template <class Element>
__device__ inline void quantize_nvfp4_columns(const Element *x, float global_scale, uint8_t *codes, uint8_t *scales, int64_t rows,
                                              int64_t cols, bool four_over_six) {
    const tile::ColumnBlock<tile::nvfp4_block> block(rows, cols, tile::are_whole(cols));
    if (block.outside) return;
    const tile::Divisor global_divisor(global_scale);
    float rows_of_four[tile::nvfp4_block][4], values[4][2][8];   // of each column the two halves of its block
    tile::load_values(x, block.first_row(), block.columns, rows_of_four);
#pragma unroll
    for (int row = 0; row < tile::nvfp4_block; ++row)
#pragma unroll
        for (int column = 0; column < 4; ++column) values[column][row / 8][row % 8] = rows_of_four[row][column];

    uint32_t scale_bytes = 0, words[tile::nvfp4_block / 2] = {};   // word i: rows 2 i and 2 i + 1 of all columns
#pragma unroll
    for (int column = 0; column < 4; ++column) {
        const tile::Nvfp4Block of_column(ptx::max_nan_f32(tile::amax_of(values[column][0]), tile::amax_of(values[column][1])));
        tile::Nvfp4Scale scale = of_column.scale(tile::Nvfp4Target::six, global_divisor, global_scale);
        tile::Codes<4> half_codes[2];
        float scaled[2][8];
#pragma unroll
        for (int half = 0; half < 2; ++half) half_codes[half] = tile::encode_nvfp4(values[column][half], scale, scaled[half]);
        if (four_over_six) {
            const tile::Nvfp4Scale other = of_column.scale(tile::Nvfp4Target::four, global_divisor, global_scale);
            const float error = __fadd_rn(tile::squared_error(scaled[0], half_codes[0], scale), tile::squared_error(scaled[1], half_codes[1], scale));
            tile::Codes<4> other_codes[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) other_codes[half] = tile::encode_nvfp4(values[column][half], other, scaled[half]);
            const float other_error = __fadd_rn(tile::squared_error(scaled[0], other_codes[0], other), tile::squared_error(scaled[1], other_codes[1], other));
            if (scale.step != 0.0f && other_error < error) {
                scale = other;
#pragma unroll
                for (int half = 0; half < 2; ++half) half_codes[half] = other_codes[half];
            }
        }
        scale_bytes |= scale.code << (8 * column);
#pragma unroll
        for (int i = 0; i < tile::nvfp4_block / 2; ++i)
            words[i] |= (half_codes[i / 4].word[0] >> (8 * (i % 4)) & 0xffu) << (8 * column);
    }
    tile::store_rows<uint8_t, 1>(scales, block.index, block.columns, {scale_bytes});
    tile::store_rows(codes, block.first_row() / 2, block.columns, words);
}

// x[rows, cols] of such codes and scales.
template <class Element>
__device__ inline void dequantize_nvfp4_columns(const uint8_t *codes, const uint8_t *scales, float global_scale, Element *x, int64_t rows,
                                                int64_t cols, bool whole) {
    const tile::ColumnBlock<tile::nvfp4_block> block(rows, cols, whole);
    if (block.outside) return;
    uint32_t scale_bytes[1];
    tile::load_rows(scales, block.index, block.columns, scale_bytes);
    float step[4];
#pragma unroll
    for (int column = 0; column < 4; ++column) step[column] = tile::nvfp4_step(scale_bytes[0] >> (8 * column), global_scale);
#pragma unroll
    for (int group = 0; group < tile::nvfp4_block / tile::group_rows; ++group) {
        uint32_t words[2];
        tile::load_rows(codes, block.first_row() / 2 + group * 2, block.columns, words);
        float values[tile::group_rows][4];
        tile::decode_group<tile::E2m1>(words, values);
#pragma unroll
        for (int row = 0; row < tile::group_rows; ++row)
#pragma unroll
            for (int column = 0; column < 4; ++column) values[row][column] *= step[column];
        tile::store_values(x, block.first_row() + group * tile::group_rows, block.columns, values);
    }
}

}  // namespace op
