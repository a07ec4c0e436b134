// Turns accumulators of a warp into rows, by way of shared memory: each lane gets consecutive columns.
#pragma once

#include <cstdint>

#include "../ptx/cp_async.cuh"
#include "../ptx/ldmatrix.cuh"
#include "../ptx/warp.cuh"
#include "fragment.cuh"
#include "narrow.cuh"
#include "shared.cuh"

namespace tile {

constexpr int share_columns = 16;   // consecutive values of a lane

// 16 rows x `columns` columns of one warp, in chunks of four words. A chunk's place in its row is swizzled, so that
// neither the writes of accumulators nor the reads of shares have bank conflicts: eight lanes that write differ in the
// lowest bit of the chunk and the two lowest of the row; eight that read differ in the bits of the share, the chunk's
// bits from 2 on, and in those of the row that are left.
template <int columns_>
struct AccumulatorStaging {
    static constexpr int columns = columns_;
    static_assert(columns % 32 == 0 && (columns & (columns - 1)) == 0, "places are linear in the bits of the column");
    static constexpr int row_shares = columns / share_columns;
    static constexpr int passes = 16 * row_shares / 32;   // for a warp to read all of it

    alignas(16) float words[16 * columns];

    __device__ static int place(int row, int column) {
        const int chunk = column / 4, swizzle = (chunk >> 3 & 3) ^ (row & 1) * 2 ^ (row >> 1 & 1) * 5;
        return row * columns + 4 * (chunk ^ swizzle) + column % 4;
    }

    // Stores `tiles` accumulators in the columns from `column` on, a multiple of 8 `tiles`. Called by the whole warp,
    // all of which sees them afterwards.
    template <int tiles, int count>
    __device__ void put(const Accumulator (&rows)[count], int column) {
        const int first = place(accumulator_row(0), accumulator_column(0)) ^ place(0, column);
        ptx::bar_warp_sync();   // all lanes have read the old contents
#pragma unroll
        for (int j = 0; j < tiles; ++j)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                *reinterpret_cast<float2 *>(words + (first ^ place(0, 8 * j)) + 8 * half * columns) = {
                    rows[j][2 * half], rows[j][2 * half + 1]};
        ptx::bar_warp_sync();   // all lanes see the new ones
    }

    // Row and first column of this lane's share in a pass, and its values. Consecutive lanes take consecutive shares of
    // a row, then of the next.
    __device__ static int row(int pass) { return (32 * pass + ptx::laneid()) / row_shares; }
    __device__ static int column() { return ptx::laneid() % row_shares * share_columns; }
    __device__ void get(int pass, float (&values)[2][8]) const { get_at(place(row(pass), column()), values); }

    // Loads or stores the share at a place, as of place(). A place 8 rows behind is 8 `columns` behind.
    __device__ void get_at(int first, float (&values)[2][8]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float4 four = *reinterpret_cast<const float4 *>(words + (first ^ 4 * i));
            values[i / 2][i % 2 * 4] = four.x, values[i / 2][i % 2 * 4 + 1] = four.y;
            values[i / 2][i % 2 * 4 + 2] = four.z, values[i / 2][i % 2 * 4 + 3] = four.w;
        }
    }
    __device__ void set_at(int first, const float (&values)[2][8]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float (&four)[8] = values[i / 2];
            const int at = i % 2 * 4;
            *reinterpret_cast<float4 *>(words + (first ^ 4 * i)) = {four[at], four[at + 1], four[at + 2], four[at + 3]};
        }
    }
};

// The same rows in 16 bits, half the bytes and a quarter of the instructions: matrices of 8 x 8 go from accumulators to
// rows, and a residual from rows to accumulators. Of a pass, each lane has a chunk of eight values of a row.
template <int columns>
struct PairStaging : SharedTile<16, 2 * columns> {
    static constexpr int row_chunks = columns / 8, passes = 16 * row_chunks / 32, pass_rows = 32 / row_chunks;

    __device__ static int row(int pass) { return (32 * pass + ptx::laneid()) / row_chunks; }
    __device__ static int column() { return ptx::laneid() % row_chunks * 8; }

    // Stores accumulators, rounded. Called by the whole warp, which sees them behind its next barrier.
    template <class Element>
    __device__ void put(const Accumulator (&rows)[columns / mma_columns], Element) {
        const uint32_t address = address_a(*this);
#pragma unroll
        for (int pair = 0; pair < row_chunks / 2; ++pair) {
            FragmentA packed;
            accumulators_to_a(packed, rows[2 * pair], rows[2 * pair + 1], Element{});
            ptx::stmatrix_x4(this->moved(address, 0, 2 * pair), packed);
        }
    }
    // Adds the values that are here to accumulators.
    template <class Element>
    __device__ void add_to(Accumulator (&rows)[columns / mma_columns], Element) const {
        const uint32_t address = address_a(*this);
#pragma unroll
        for (int pair = 0; pair < row_chunks / 2; ++pair) {
            FragmentA packed;
            ptx::ldmatrix_x4(packed, this->moved(address, 0, 2 * pair));
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 both = unpack_pair(packed[i], Element{});
                float (&here)[4] = rows[2 * pair + i / 2];
                here[i % 2 * 2] += both.x, here[i % 2 * 2 + 1] += both.y;
            }
        }
    }
    // Starts copying this lane's chunk of a pass from global memory.
    __device__ void copy(int pass, const void *source, bool present) {
        ptx::cp_async_cg_16_if(present, this->address(row(pass), column() / 8), source);
    }
    __device__ const uint4 &get(int pass) const { return this->at(row(pass), column() / 8); }
};

}   // namespace tile
