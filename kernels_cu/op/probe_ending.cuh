// Stores rows of float32 by the ending that kernels share (ending.cuh), with values in lanes in each of the ways that
// kernels use.
#pragma once

#include <cstdint>

#include "../tile/fragment.cuh"
#include "../tile/lanes.cuh"
#include "../tile/staging.cuh"
#include "ending.cuh"

namespace op {

constexpr int probe_ending_warps = 4, probe_ending_columns = 64, probe_ending_rows = 16 * probe_ending_warps;

struct ProbeEndingShared {
    tile::AccumulatorStaging<probe_ending_columns> staging[probe_ending_warps];
};

// How a lane gets its values: by loads of 8, by loads of 16, or from accumulators.
enum class ValuesInLanes { eights, sixteens, accumulators };

// A block takes 64 rows and 64 columns of x[rows, cols], a warp 16 rows of them.
__device__ inline void probe_ending(ProbeEndingShared &shared, const FloatRows &x, const OutputRows &out,
                                    const QuantizedRows &quantized, ValuesInLanes way, int64_t rows, int cols) {
    using Staging = tile::AccumulatorStaging<probe_ending_columns>;
    Staging &staging = shared.staging[threadIdx.x / 32];
    const int64_t block_row = int64_t(blockIdx.y) * probe_ending_rows, first_row = block_row + threadIdx.x / 32 * 16;
    const int first_column = blockIdx.x * probe_ending_columns;
    constexpr float past_the_end = 1e30f;   // must not reach an output
    const auto finish = [&](int64_t row, int column, auto &values) {
        if (row < rows && column < cols) store_share(out, row, column, cols, values);
        if (quantized.format != EndingFormat::none) quantized.store(row, column, cols, row < rows, values);
    };
    // The rows of this warp.
    if (way == ValuesInLanes::eights) {
        constexpr int shares = probe_ending_columns / 8;
#pragma unroll 1
        for (int pass = 0; pass < shares / 2; ++pass) {
            const int64_t row = first_row + tile::lane_item(32 * pass) / shares;
            const int column = first_column + tile::lane_item(0) % shares * 8;
            float values[1][8] = {};
            if (row < rows && column < cols) load_share(x, row, column, cols, values);
            finish(row, column, values);
        }
    } else {
        if (way == ValuesInLanes::accumulators) {
            tile::Accumulator sums[probe_ending_columns / 8];
#pragma unroll
            for (int j = 0; j < probe_ending_columns / 8; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int64_t row = first_row + tile::accumulator_row(i);
                    const int column = first_column + 8 * j + tile::accumulator_column(i);
                    sums[j][i] = row < rows && column < cols ? x.f32[row * x.stride + column] : past_the_end;
                }
            staging.put<Staging::columns / tile::mma_columns>(sums, 0);
        }
#pragma unroll 1
        for (int pass = 0; pass < Staging::passes; ++pass) {
            const int64_t row = first_row + Staging::row(pass);
            const int column = first_column + Staging::column();
            float values[2][8] = {};
            if (way == ValuesInLanes::accumulators) staging.get(pass, values);
            else if (row < rows && column < cols) load_share(x, row, column, cols, values);
            finish(row, column, values);
        }
    }
    // The padding of the last tile of scales.
    if (quantized.format == EndingFormat::none || block_row + probe_ending_rows < rows) return;
    const int block = quantized.format == EndingFormat::nvfp4 ? tile::nvfp4_block : tile::mx_block;
    quantized.fill_tile(rows, first_column / block, (first_column + probe_ending_columns) / block);
}

}   // namespace op
