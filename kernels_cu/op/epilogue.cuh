// The epilogue of matrix products, applied to sums in registers: bias, activation, residual, rounding or quantization.
#pragma once

#include <cstdint>

#include "../kernel.cuh"
#include "../tile/lanes.cuh"
#include "../tile/staging.cuh"
#include "activation.cuh"
#include "ending.cuh"

namespace op {

// The epilogue's parameters. Missing arrays are null; a count of 1 means one number for all groups.
struct EpilogueOptions {
    FloatRows bias;       // [groups, cols]
    FloatRows residual;   // [batch, rows, width]
    OutputRows out;       // [batch, rows, width]
    int64_t residual_batch, out_batch;
    uint8_t *codes, *scales;                                  // of C [batch rows, width], if `ending` is not 0
    const float *alphas, *a_global, *b_global, *out_global;   // [alpha_count], [1], [1], [level_count]
    float alpha, limit, gate_alpha, offset;
    int activation, ending, rule, swizzled, in_place;   // in_place: `out` holds the residual
    int alpha_count, level_count, width;
    int64_t code_bytes;

    __device__ int block() const {
        return EndingFormat(ending) == EndingFormat::nvfp4 ? tile::nvfp4_block : tile::mx_block;
    }
    __device__ QuantizedRows quantized_rows(float global) const {
        const int64_t blocks = ceil_div(width, block());
        return {EndingFormat(ending), codes, scales, code_bytes, {blocks, blocks, swizzled != 0}, rule, global};
    }
};

// Pads the last tile of scales behind the `rows` rows of every matrix, for the columns of C from `col` on, counted
// before the activation. Called by one whole block for all matrices, however rows are grouped.
__device__ inline void fill_scale_tiles(const EpilogueOptions &options, int rows, int col, int cols) {
    if (EndingFormat(options.ending) == EndingFormat::none) return;
    const int halves = Activation(options.activation) == Activation::swiglu, block = options.block();
    options.quantized_rows(1.0f).fill_tile(int64_t(gridDim.z) * rows, (col >> halves) / block,
                                           ((col + cols) >> halves) / block);
}

// The epilogue of one matrix of C.
struct Epilogue {
    FloatRows bias, residual;
    OutputRows out;
    QuantizedRows quantized;
    Activation activation;
    Gate gate;
    float alpha;
    int64_t first_row;   // of this matrix among all rows of C
    int rows, cols, width, bias_row;

    __device__ Epilogue(const EpilogueOptions &options, int matrix, int group, int rows, int cols)
        : bias(options.bias), residual(options.residual), out(options.out), activation(Activation(options.activation)),
          gate{options.limit, options.gate_alpha, options.offset}, first_row(int64_t(matrix) * rows), rows(rows),
          cols(cols), width(options.width), bias_row(group) {
        const auto moved = [matrix](auto *&data, int64_t batch) {
            if (data) data += matrix * batch;
        };
        moved(residual.bf16, options.residual_batch), moved(residual.f16, options.residual_batch);
        moved(residual.f32, options.residual_batch);
        moved(out.bf16, options.out_batch), moved(out.f16, options.out_batch), moved(out.f32, options.out_batch);
        if (options.in_place) residual = {out.bf16, out.f16, out.f32, out.stride};
        const auto level = [](const float *of) { return of ? *of : 1.0f; };
        alpha = options.alphas ? options.alphas[min(group, options.alpha_count - 1)] : options.alpha;
        alpha *= level(options.a_global) * level(options.b_global);
        quantized =
            options.quantized_rows(options.out_global ? options.out_global[min(group, options.level_count - 1)] : 1.0f);
    }

    // The place of a lane's share of sums in a pass of a warp. A gated share has twice the columns. Every pass of a
    // lane has the same columns.
    template <class Staging>
    struct Share {
        static_assert(32 % Staging::row_shares == 0);
        int row, column;

        __device__ Share(int item, bool halves) {
            row = (item << halves) / Staging::row_shares;
            column = (item << halves) % Staging::row_shares * tile::share_columns;
        }
    };

    // The bias of a lane's share, for the columns of the staging from `col` on.
    struct LaneBias {
        float values[2][2][8] = {};
    };
    template <class Staging>
    __device__ LaneBias lane_bias(int col) const {
        const bool halves = activation == Activation::swiglu;
        const int column = col + Share<Staging>(tile::lane_item(0), halves).column;
        LaneBias result;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int here = column + half * tile::share_columns;
            if (bias.there() && half <= halves && here < cols)
                load_share(bias, bias_row, here, cols, result.values[half]);
        }
        return result;
    }

    // Finishes 16 rows of sums from `row` on, those before end_row, with the columns of the staging from `col` on.
    // Called by the whole warp.
    template <class Staging>
    __device__ void finish(const Staging &staging, int row, int end_row, int col, const LaneBias &lane_bias) const {
        const bool halves = activation == Activation::swiglu;
        const int items = 16 * Staging::row_shares >> halves;
#pragma unroll 1
        for (int first = 0; first < items; first += 32) {
            const int item = min(tile::lane_item(first), items - 1);
            const Share<Staging> share(item, halves);
            const int row_here = row + share.row, column = (col + share.column) >> halves;
            const bool present = tile::lane_item(first) < items && row_here < end_row;
            // This lane's share, with bias and activation.
            float values[2][8];
            staging.get(share.row, share.column, values);
            add_bias(lane_bias.values[0], values);
            if (halves) {
                float more[2][8];
                staging.get(share.row, share.column + tile::share_columns, more);
                add_bias(lane_bias.values[1], more);
#pragma unroll
                for (int i = 0; i < 8; ++i) values[0][i] = gate(values[i / 4][i % 4 * 2], values[i / 4][i % 4 * 2 + 1]);
#pragma unroll
                for (int i = 0; i < 8; ++i) values[1][i] = gate(more[i / 4][i % 4 * 2], more[i / 4][i % 4 * 2 + 1]);
            } else {
                activate(values, activation);
            }
            // The residual.
            if (residual.there() && present && column < width) {
                float more[2][8];
                load_share(residual, row_here, column, width, more);
#pragma unroll
                for (int i = 0; i < 16; ++i) values[i / 8][i % 8] += more[i / 8][i % 8];
            }
            // The output.
            if (out.there() && present && column < width) store_share(out, row_here, column, width, values);
            if (quantized.format != EndingFormat::none)
                quantized.store(first_row + row_here, column, width, present, values);
        }
    }

private:
    // alpha times the sums, plus the bias.
    __device__ void add_bias(const float (&bias_here)[2][8], float (&values)[2][8]) const {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            float &value = values[i / 8][i % 8];
            value = bias.there() ? fmaf(value, alpha, bias_here[i / 8][i % 8]) : value * alpha;
        }
    }
};

}   // namespace op
