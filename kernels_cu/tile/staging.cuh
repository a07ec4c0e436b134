// Turns accumulators of a warp into rows, by way of shared memory: each lane gets consecutive columns.
#pragma once

#include <cstdint>

#include "../ptx/warp.cuh"
#include "fragment.cuh"

namespace tile {

constexpr int share_columns = 16;   // consecutive values of a lane

// 16 rows x `columns` columns of one warp. Neighboring lanes' columns are 20 words apart, so that reads of 16 bytes use
// all banks.
template <int columns>
struct AccumulatorStaging {
    static_assert(columns % 32 == 0, "the lanes of a warp share 16 rows evenly");
    static constexpr int row_shares = columns / share_columns, pitch = 20 * row_shares;
    static constexpr int passes = 16 * row_shares / 32;   // for a warp to read all of it

    alignas(16) float words[16 * pitch];

    __device__ static int place(int row, int column) { return row * pitch + column + 4 * (column / share_columns); }

    // Stores the accumulators. Called by the whole warp, all of which sees them afterwards.
    __device__ void put(const Accumulator (&rows)[columns / mma_columns]) {
        const int first = place(accumulator_row(0), accumulator_column(0));
        ptx::bar_warp_sync();   // all lanes have read the old contents
#pragma unroll
        for (int j = 0; j < columns / mma_columns; ++j)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                *reinterpret_cast<float2 *>(words + first + 8 * half * pitch + 8 * j + 4 * (j / 2)) = {
                    rows[j][2 * half], rows[j][2 * half + 1]};
        ptx::bar_warp_sync();   // all lanes see the new ones
    }

    // Row and first column of this lane's share in a pass, and its values. Consecutive lanes take consecutive shares of
    // a row, then of the next.
    __device__ static int row(int pass) { return (32 * pass + ptx::laneid()) / row_shares; }
    __device__ static int column() { return ptx::laneid() % row_shares * share_columns; }
    __device__ void get(int pass, float (&values)[2][8]) const { get(row(pass), column(), values); }

    // The share that begins at a row and column.
    __device__ void get(int row, int column, float (&values)[2][8]) const {
        const float4 *source = reinterpret_cast<const float4 *>(words + place(row, column));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float4 four = source[i];
            values[i / 2][i % 2 * 4] = four.x, values[i / 2][i % 2 * 4 + 1] = four.y;
            values[i / 2][i % 2 * 4 + 2] = four.z, values[i / 2][i % 2 * 4 + 3] = four.w;
        }
    }
};

}   // namespace tile
