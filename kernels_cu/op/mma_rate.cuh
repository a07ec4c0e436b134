// How fast tensor cores multiply: chains of one kind of mma.sync on registers alone, with an A that changes after each
// step.
#pragma once

#include <cstdint>

#include "../kernel.cuh"
#include "../ptx/barrier.cuh"
#include "../ptx/mma.cuh"
#include "../tile/fragment.cuh"
#include "../tile/shared.cuh"

namespace op {

constexpr int mma_rate_warps = 8;
constexpr int mma_rate_threads = 32 * mma_rate_warps;
constexpr int mma_rate_a = 2;   // fragments of A
constexpr int mma_rate_b = 4;   // fragments of B, an even number
// Every A with every B: with two blocks to a multiprocessor each scheduler has 32 independent MMAs to choose from.
constexpr int mma_rate_chains = mma_rate_a * mma_rate_b;

// Fragments of A and B are rows of 32 bytes for every kind of MMA (tile/fragment.cuh).
struct MmaRateShared {
    tile::SharedTile<mma_rate_a * tile::mma_rows, 32> a;
    tile::SharedTile<mma_rate_b * tile::mma_columns, 32> b;
};

struct Bf16Mma {
    __device__ static void multiply(tile::Accumulator &c, const tile::FragmentA &a, const tile::FragmentB &b) {
        ptx::mma_m16n8k16_bf16(c, a, b);
    }
};

// All scales are 1.
constexpr uint32_t ones_ue8m0 = 0x7f7f7f7f, ones_ue4m3 = 0x38383838;

// 8-bit containers.
template <class Format>
struct Mxf8f6f4Mma {
    __device__ static void multiply(tile::Accumulator &c, const tile::FragmentA &a, const tile::FragmentB &b) {
        ptx::mma_m16n8k32_mxf8f6f4<Format, Format, 0, 0, 0, 0>(c, a, b, ones_ue8m0, ones_ue8m0);
    }
};

// Packed e2m1 under scales of 32 and of 16.
struct Mxf4Mma {
    __device__ static void multiply(tile::Accumulator &c, const tile::FragmentA &a, const tile::FragmentB &b) {
        ptx::mma_m16n8k64_mxf4<0, 0, 0, 0>(c, a, b, ones_ue8m0, ones_ue8m0);
    }
};
struct Mxf4nvf4Mma {
    __device__ static void multiply(tile::Accumulator &c, const tile::FragmentA &a, const tile::FragmentB &b) {
        ptx::mma_m16n8k64_mxf4nvf4<0, 0>(c, a, b, ones_ue4m3, ones_ue4m3);
    }
};

template <class Tile>
__device__ inline void fill_tile(Tile &tile, const uint4 *chunks) {
    for (int i = threadIdx.x; i < Tile::rows * Tile::row_chunks; i += mma_rate_threads)
        tile.at(i / Tile::row_chunks, i % Tile::row_chunks) = chunks[i];
}

// c[chain][16][8] of every warp = the sum over `steps` steps of A B, where chain = 4 (fragment of A) + (fragment of B)
// and the bits `flip` of every 32-bit word of A change after each step. a: 2 fragments of 16 rows of 32 bytes, b: 4 of
// 8, c: room for all warps of the block; a and b 16-byte aligned. Called by the whole block.
//
// With a constant A, the compiler could move products, or conversions of operands, out of the loop. It does not know
// `flip`. The loop is not unrolled: over two steps, the compiler would know that the second flip undoes the first.
template <class Mma>
__device__ inline void mma_rate(MmaRateShared &shared, const void *a, const void *b, float *c, int steps,
                                uint32_t flip) {
    fill_tile(shared.a, static_cast<const uint4 *>(a));
    fill_tile(shared.b, static_cast<const uint4 *>(b));
    ptx::bar_sync();   // both tiles are complete

    // The fragments.
    tile::FragmentA left[mma_rate_a];
    tile::FragmentB right[mma_rate_b / 2][2];
#pragma unroll
    for (int i = 0; i < mma_rate_a; ++i) tile::load_a(left[i], shared.a, i * tile::mma_rows, 0);
#pragma unroll
    for (int j = 0; j < mma_rate_b / 2; ++j) tile::load_b(right[j], shared.b, 2 * j * tile::mma_columns, 0);

    // The chains.
    tile::Accumulator sums[mma_rate_a][mma_rate_b] = {};
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
#pragma unroll
        for (int i = 0; i < mma_rate_a; ++i) {
#pragma unroll
            for (int j = 0; j < mma_rate_b; ++j) Mma::multiply(sums[i][j], left[i], right[j / 2][j % 2]);
#pragma unroll
            for (uint32_t &word : left[i]) word ^= flip;
        }
    }

    // The output.
    constexpr int outputs = tile::mma_rows * tile::mma_columns;
    c += threadIdx.x / 32 * mma_rate_chains * outputs;
#pragma unroll
    for (int chain = 0; chain < mma_rate_chains; ++chain)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            c[chain * outputs + tile::accumulator_row(i) * tile::mma_columns + tile::accumulator_column(i)] =
                sums[chain / mma_rate_b][chain % mma_rate_b][i];
}

}   // namespace op
