// Rows that become rows: how the kernels between two matrix products load what they work on, and how they end, in 16
// or 32 bits or in the codes and scales of a block format. A lane has shares of 16 consecutive values.
#pragma once

#include <cstdint>

#include "../kernel.cuh"
#include "../tile/rows.cuh"
#include "ending.cuh"

namespace op {

constexpr int produce_threads = 256, produce_share = 16;

// A lane's shares of one row, `count` of them, on their way: all loads go out before the first value is used.
template <class Element, int count>
struct RowShares {
    tile::Eight<Element> eights[count][2];

    // Those from `column` on, `step` columns apart, of a row of `cols` values; zeros past the end, and everywhere of a
    // row that is not there.
    __device__ void load(const Element *row, bool present, int column, int step, int cols) {
        const bool whole = cols % 8 == 0 && is_chunk(row);
#pragma unroll
        for (int i = 0; i < 2 * count; ++i) {
            tile::Eight<Element> &eight = eights[i / 2][i % 2];
            const int at = column + i / 2 * step + i % 2 * 8;
            if (!present || at >= cols) eight.clear();
            else if (whole) eight.load(row + at);
            else eight.load(row + at, cols - at);
        }
    }

    __device__ void unpack(int share, float (&values)[2][8]) const {
        eights[share][0].unpack(values[0]);
        eights[share][1].unpack(values[1]);
    }
};

// A value as an element holds it: rounded to nearest, ties to even.
template <class Element>
__device__ inline float rounded(float value) {
    return float(Element(value));
}

// Where the rows go that a kernel makes.
struct Produced {
    OutputRows out;            // or
    QuantizedRows quantized;   // where its format is not `none`
    int64_t rows;
    int cols;

    __device__ bool quantizes() const { return quantized.format != EndingFormat::none; }

    // The rows to go through: those of padding, too, where scales lie in 128x4 tiles.
    __device__ int64_t end() const {
        constexpr int64_t tile = tile::scale_tile_rows;
        return quantizes() && quantized.places.swizzled ? ceil_div(rows, tile) * tile : rows;
    }

    // Stores a lane's share, by the whole warp; nothing of a row that is not there.
    __device__ void store(int64_t row, int column, float (&values)[2][8]) const {
        const bool present = row < rows;
        if (present && column < cols) store_share(out, row, column, cols, values);
        if (quantizes()) quantized.store(row, column, cols, present, values);
    }

    // Scales of 0 in a row of padding, by `lanes` lanes.
    __device__ void clear(int64_t row, int lane, int lanes) const {
        const tile::ScalePlaces &places = quantized.places;
        for (int64_t block = 4 * lane; block < places.padded_blocks(); block += 4 * lanes)
            *reinterpret_cast<uint32_t *>(quantized.scales + places.at(row, block)) = 0;
    }
};

// As entries are given it: the outputs, of which one is there.
#define PRODUCED_OUTPUTS float *out_f32, __half *out_f16, __nv_bfloat16 *out_bf16, uint8_t *codes, uint8_t *scales
#define PRODUCED_SCALARS int ending, int rule, int swizzled
#define PRODUCED_STRIDES int64_t out_f32_row, int64_t out_f16_row, int64_t out_bf16_row
#define PRODUCED(rows, cols)                                                                                           \
    op::produced({out_bf16, out_f16, out_f32,                                                                          \
                  out_bf16  ? out_bf16_row                                                                             \
                  : out_f16 ? out_f16_row                                                                              \
                            : out_f32_row},                                                                            \
                 codes, scales, code_bytes, out_global, ending, rule, swizzled, rows, cols)

__device__ inline Produced produced(const OutputRows &out, uint8_t *codes, uint8_t *scales, int64_t code_bytes,
                                    const float *global, int ending, int rule, int swizzled, int64_t rows, int cols) {
    const EndingFormat format = EndingFormat(ending);
    const int64_t blocks = ceil_div(cols, format == EndingFormat::nvfp4 ? tile::nvfp4_block : tile::mx_block);
    return {out,
            {format, codes, scales, code_bytes, {blocks, blocks, swizzled != 0}, rule, global ? *global : 1.0f},
            rows,
            cols};
}

// Goes through shares of all rows that are each made of the same columns of other rows: load(row, column, raw) begins
// to load what make(raw, row, values) makes values of. Of 16-bit elements the next share is on its way meanwhile.
template <class Element, class Raw, class Load, class Make>
__device__ inline void produce_shares(const Produced &target, Load &&load, Make &&make) {
    constexpr bool ahead = sizeof(Element) == 2;
    const uint32_t shares = 2 * ceil_div(target.cols, 2 * produce_share);   // of a row: those of a block stay together
    const int64_t items = target.end() * shares, step = int64_t(gridDim.x) * produce_threads;
    const bool few = items <= INT32_MAX - step;
    int64_t row;
    int share;
    const auto find = [&](int64_t item) {
        if (few) row = uint32_t(item) / shares;
        else row = item / shares;
        share = item - row * shares;
    };
    Raw next;
    int64_t first = int64_t(blockIdx.x) * produce_threads;
    if (ahead && first < items) {
        find(first + threadIdx.x);
        load(row, share * produce_share, next);
    }
#pragma unroll 1
    for (; first < items; first += step) {
        find(first + threadIdx.x);
        const int64_t here = row;
        const int column = share * produce_share, lane = share;
        if (!ahead) load(here, column, next);
        const Raw raw = next;
        if (ahead && first + step < items) {
            find(first + step + threadIdx.x);
            load(row, share * produce_share, next);
        }
        float values[2][8];
        make(raw, here, values);
        target.store(here, column, values);
        if (here >= target.rows && here < target.end()) target.clear(here, lane, shares);
    }
}

}   // namespace op
