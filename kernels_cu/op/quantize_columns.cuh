// Quantization to the MX formats and NVFP4 and back, of blocks that run down the columns of matrices.
#pragma once

#include <cstdint>

#include "../tile/columns.cuh"
#include "../tile/format.cuh"
#include "../tile/narrow.cuh"
#include "../tile/scale.cuh"
#include "../tile/thresholds.cuh"
#include "layout.cuh"

namespace op {

using tile::columns_threads;
using tile::columns_tile;
using tile::columns_warps;

// Blocks of threads on a multiprocessor: a lane holds all of its columns' blocks, 128 values.
template <class Element>
constexpr int quantize_columns_blocks = sizeof(Element) == 4 ? 3 : 4;
template <class Format, class Element>   // eight bits a code need more registers
constexpr int quantize_mx_columns_blocks = Format::bits == 8 ? 2 : quantize_columns_blocks<Element>;
template <class Element>
constexpr int dequantize_columns_blocks = 4;
template <class Element>
constexpr int dequantize_nvfp4_columns_blocks = 6;   // blocks of half as many rows

// Calls body(whole) with whether rows of `cols` begin at multiples of a lane's columns, as a compile-time constant:
// loads that need no test go out together.
template <class Body>
__device__ inline void with_columns(int64_t cols, Body &&body) {
    if (cols % tile::lane_columns == 0) body(std::true_type{});
    else body(std::false_type{});
}

// The scales of all matrices: [outer, rows / block, cols], or in tiles, with a row for each column of each matrix.
// sizes: of the array of scales; the others are the sizes of x.
struct ColumnScales {
    uint8_t *scales;
    bool swizzled;
    int64_t sizes[3], outer, rows, cols;

    template <int block>
    __device__ TiledScales tiled() const {
        const size_t bytes = sizes[0] * sizes[1] * sizes[2];
        return {scales, bytes, {size_t(outer), size_t(rows) / block, size_t(cols)}};
    }

    // Stores the scales of a lane's columns of a block of this matrix, one byte each. before: linear scales before
    // those of the block's first column.
    template <int block_rows, bool whole>
    __device__ void store(const tile::ColumnBlock<block_rows, whole> &block, int64_t before, uint32_t of_lane) const {
        if (!swizzled) {
            tile::store_bytes(scales + before, 0, block.columns, of_lane);
            return;
        }
        const size_t row = blockIdx.z * cols + block.columns.first;
#pragma unroll 1
        for (int i = 0; i < (whole ? tile::lane_columns : block.columns.present); ++i)
            tiled<block_rows>().put(row + i, block.index, of_lane >> (8 * i));
    }

    // Pads tiles of scales. Called by lanes without values; acts only in blocks of threads that have no columns at all.
    template <int block>
    __device__ void fill() const {
        if (!swizzled || int64_t(blockIdx.x) * columns_tile < cols) return;
        const size_t number = size_t(blockIdx.z) * gridDim.y + blockIdx.y, blocks = size_t(gridDim.z) * gridDim.y;
        tiled<block>().fill(number * columns_threads + threadIdx.x, blocks * columns_threads);
    }
};

// Codes [outer, rows * bits / 8, cols] and scales of x[outer, rows, cols] in an MX format; rows is a multiple of 32.
template <class Format, bool whole, class Element>
__device__ inline void quantize_mx_columns(const Element *x, uint8_t *codes, const ColumnScales &scales,
                                           tile::ScaleRule rule) {
    const size_t values = blockIdx.z * size_t(scales.rows) * scales.cols;   // before this matrix
    x += values;
    codes += Format::bits == 8 ? values : values / 8 * Format::bits;
    // The block's rows, and the largest magnitude of each column.
    const tile::ColumnBlock<tile::mx_block, whole> block(scales.rows, scales.cols);
    if (block.outside) return scales.fill<tile::mx_block>();
    tile::RowShare<Element> shares[tile::mx_block];
#pragma unroll
    for (int row = 0; row < tile::mx_block; ++row) shares[row].load(x, block.first_row() + row, block.columns);

    float amax[4];
    tile::amax_of(shares, amax);
    // The scales.
    uint32_t scale[4], scale_bytes = 0, finite = 0;   // a byte to a column; `finite`: 0xff if its block is finite
#pragma unroll
    for (int column = 0; column < 4; ++column) {
        scale[column] = tile::mx_scale<Format>(amax[column], rule);
        scale_bytes |= scale[column] << (8 * column);
        if (scale[column] != tile::ue8m0_nan) finite |= 0xffu << (8 * column);
    }
    scales.store(block, (values + block.first_row() * scales.cols) / tile::mx_block, scale_bytes);

    // The codes, eight rows at a time.
#pragma unroll
    for (int group = 0; group < tile::mx_block / tile::group_rows; ++group) {
        tile::Codes<Format::bits> column_codes[4];
#pragma unroll
        for (int column = 0; column < 4; ++column) {
            const tile::RowShare<Element> *rows = shares + group * tile::group_rows;
            if constexpr (tile::is_bf16<Element>) {
                uint32_t pairs[4];
                tile::column_pairs(rows, column, pairs);
                column_codes[column] = tile::encode_scaled<Format>(pairs, scale[column]);
            } else {
                float values[8];
                tile::column_values(rows, column, values);
                column_codes[column] = tile::encode_scaled<Format>(values, scale[column]);
            }
        }
        uint32_t bytes[Format::bits];
        tile::rows_of_bytes(column_codes, bytes);
        const int64_t first_byte = block.first_row() / 8 * Format::bits + group * Format::bits;
#pragma unroll
        for (int i = 0; i < Format::bits; ++i)
            tile::store_bytes(codes, first_byte + i, block.columns, bytes[i] & finite);
    }
}

// The codes of a lane's columns of a block, all of them loaded before the first is used.
template <class Format, int block_rows, bool whole>
__device__ inline void load_codes(const uint8_t *codes, const tile::ColumnBlock<block_rows, whole> &block,
                                  uint32_t (&bytes)[block_rows / tile::group_rows][Format::bits]) {
#pragma unroll
    for (int i = 0; i < block_rows / 8 * Format::bits; ++i)
        bytes[i / Format::bits][i % Format::bits] =
            tile::load_bytes(codes, block.first_row() / 8 * Format::bits + i, block.columns);
}

// Decodes one group of rows, multiplies each column by its factor and stores them.
template <class Format, int block_rows, bool whole, class Element>
__device__ inline void store_decoded(const uint32_t (&bytes)[Format::bits], const float (&factor)[4], Element *x,
                                     const tile::ColumnBlock<block_rows, whole> &block, int group) {
    tile::Codes<Format::bits> column_codes[4];
    tile::columns_of_codes(bytes, column_codes);
    float values[tile::group_rows][4];
#pragma unroll
    for (int column = 0; column < 4; ++column) {
        float decoded[8];
        Format::decode(column_codes[column], decoded);
#pragma unroll
        for (int row = 0; row < tile::group_rows; ++row) values[row][column] = decoded[row] * factor[column];
    }
#pragma unroll
    for (int row = 0; row < tile::group_rows; ++row)
        tile::store_row(x, block.first_row() + group * tile::group_rows + row, block.columns, values[row]);
}

// x[rows, cols] of such codes and scales.
template <class Format, bool whole, class Element>
__device__ inline void dequantize_mx_columns(const uint8_t *codes, const uint8_t *scales, Element *x, int64_t rows,
                                             int64_t cols) {
    const tile::ColumnBlock<tile::mx_block, whole> block(rows, cols);
    if (block.outside) return;
    const uint32_t scale_bytes = tile::load_bytes(scales, block.index, block.columns);
    uint32_t bytes[tile::mx_block / tile::group_rows][Format::bits];
    load_codes<Format>(codes, block, bytes);
    float scale[4];
#pragma unroll
    for (int column = 0; column < 4; ++column) scale[column] = ptx::cvt_f32_ue8m0(scale_bytes >> (8 * column) & 0xffu);
#pragma unroll
    for (int group = 0; group < tile::mx_block / tile::group_rows; ++group)
        store_decoded<Format>(bytes[group], scale, x, block, group);
}

// Codes [outer, rows / 2, cols] and ue4m3 scales of x[outer, rows, cols] in NVFP4; rows is a multiple of 16.
template <bool better_of_two, bool whole, class Element>
__device__ inline void quantize_nvfp4_columns(const Element *x, float global_scale, uint8_t *codes,
                                              const ColumnScales &scales) {
    const size_t values = blockIdx.z * size_t(scales.rows) * scales.cols;   // before this matrix
    x += values;
    codes += values / 2;
    const tile::ColumnBlock<tile::nvfp4_block, whole> block(scales.rows, scales.cols);
    if (block.outside) return scales.fill<tile::nvfp4_block>();
    // The block's rows, and the largest magnitude of each column.
    const tile::Nvfp4Global global(global_scale);
    tile::RowShare<Element> shares[tile::nvfp4_block];
#pragma unroll
    for (int row = 0; row < tile::nvfp4_block; ++row) shares[row].load(x, block.first_row() + row, block.columns);

    float amax[4];
    tile::amax_of(shares, amax);
    const auto store = [&](uint32_t scale_bytes, const uint32_t (&bytes)[8]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) tile::store_bytes(codes, block.first_row() / 2 + i, block.columns, bytes[i]);
        scales.store(block, (values + block.first_row() * scales.cols) / tile::nvfp4_block, scale_bytes);
    };
    uint32_t scale_bytes = 0, bytes[8];
    // Pairs of 16-bit values by thresholds, where all four columns have them.
    if constexpr (tile::uses_thresholds<Element> && !better_of_two) {
        using Thresholds = tile::E2m1Thresholds<Element>;
        bool all = true;
#pragma unroll
        for (float one : amax) all = all && tile::has_thresholds<Element>(one, global);
        if (all) {
            uint32_t pairs[2][8];   // of columns: the codes of two rows in the upper byte of each half
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
                const float low_amax = amax[2 * pair], high_amax = amax[2 * pair + 1];
                const tile::Nvfp4Scale low = tile::plain_nvfp4_scale(low_amax, global),
                                       high = tile::plain_nvfp4_scale(high_amax, global);
                scale_bytes |= (low.code | high.code << 8) << (16 * pair);
                const Thresholds thresholds({low.step, low_amax}, {high.step, high_amax});
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    pairs[pair][i] = tile::join_upper_nibbles(thresholds.codes(shares[2 * i].word[pair]),
                                                              thresholds.codes(shares[2 * i + 1].word[pair]));
            }
#pragma unroll
            for (int i = 0; i < 8; ++i) bytes[i] = tile::upper_bytes(pairs[0][i], pairs[1][i]);
            store(scale_bytes, bytes);
            return;
        }
    }
    // Any other values by division.
    tile::Codes<4> column_codes[2][4];   // of the two halves of each column's block
#pragma unroll
    for (int column = 0; column < 4; ++column) {
        float values[2][8];
#pragma unroll
        for (int half = 0; half < 2; ++half) tile::column_values(shares + 8 * half, column, values[half]);
        tile::Codes<4> codes_of_half[2];
        const tile::Nvfp4Scale scale =
            tile::encode_nvfp4_block<better_of_two>(values, amax[column], global, codes_of_half);
        scale_bytes |= scale.code << (8 * column);
#pragma unroll
        for (int half = 0; half < 2; ++half) column_codes[half][column] = codes_of_half[half];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        uint32_t of_half[4];
        tile::rows_of_bytes(column_codes[half], of_half);
#pragma unroll
        for (int i = 0; i < 4; ++i) bytes[4 * half + i] = of_half[i];
    }
    store(scale_bytes, bytes);
}

// x[rows, cols] of such codes and scales.
template <bool whole, class Element>
__device__ inline void dequantize_nvfp4_columns(const uint8_t *codes, const uint8_t *scales, float global_scale,
                                                Element *x, int64_t rows, int64_t cols) {
    const tile::ColumnBlock<tile::nvfp4_block, whole> block(rows, cols);
    if (block.outside) return;
    const uint32_t scale_bytes = tile::load_bytes(scales, block.index, block.columns);
    uint32_t bytes[tile::nvfp4_block / tile::group_rows][tile::E2m1::bits];
    load_codes<tile::E2m1>(codes, block, bytes);
    float step[4];
#pragma unroll
    for (int column = 0; column < 4; ++column)
        step[column] = tile::nvfp4_step(scale_bytes >> (8 * column), global_scale);
#pragma unroll
    for (int group = 0; group < tile::nvfp4_block / tile::group_rows; ++group)
        store_decoded<tile::E2m1>(bytes[group], step, x, block, group);
}

}   // namespace op
