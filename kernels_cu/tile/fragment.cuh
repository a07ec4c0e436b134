// Fragments of mma.sync: where their elements are in a tile, and how ldmatrix loads them from shared memory.
//
// ptx/mma.cuh states the layouts. A and B fragments of 8-bit elements (k = 32) and of 16-bit elements (k = 16) have the
// same bytes in the same places: a row of A and a column of B are 32 bytes, two 16-byte chunks.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "../ptx/cvt.cuh"
#include "../ptx/ldmatrix.cuh"
#include "../ptx/math.cuh"
#include "../ptx/mma.cuh"
#include "../ptx/warp.cuh"
#include "shared.cuh"

namespace tile {

using FragmentA = uint32_t[4];
using FragmentB = uint32_t[2];
using Accumulator = float[4];   // 16 rows x 8 columns of f32 over a warp

constexpr int mma_rows = 16;
constexpr int mma_columns = 8;

// Row (0..15) and column (0..7) of element i of this lane's accumulator.
__device__ inline int accumulator_row(int i) { return ptx::laneid() / 4 + 8 * (i >> 1); }
__device__ inline int accumulator_column(int i) { return 2 * (ptx::laneid() % 4) + (i & 1); }

// Calls body(slice, half) for each row of a lane: row g + 8 half of each of `slices` slices of 16 rows. Both are
// constants after unrolling.
template <int slices, class Body>
__device__ __forceinline__ void for_rows(Body &&body) {
#pragma unroll
    for (int slice = 0; slice < slices; ++slice)
#pragma unroll
        for (int half = 0; half < 2; ++half) body(slice, half);
}

// The address at which this lane reads A, B or B transposed of a tile, for the fragment at row 0 and chunk 0. Other
// fragments are constant offsets from it, so a loop needs no address arithmetic.
template <class Tile>
__device__ inline uint32_t address_a(const Tile &tile) {
    return tile.address(ptx::laneid() % 16, ptx::laneid() / 16);
}
template <class Tile>
__device__ inline uint32_t address_b(const Tile &tile) {
    return tile.address(ptx::laneid() % 8 + 8 * (ptx::laneid() / 16), ptx::laneid() / 8 % 2);
}
template <class Tile>
__device__ inline uint32_t address_b_transposed(const Tile &tile) {
    return tile.address(ptx::laneid() % 16, ptx::laneid() / 16);
}

// A: 16 rows from `first_row`, the two chunks from `first_chunk`; both are even and, as below, rows a multiple of 8.
template <class Tile>
__device__ inline void load_a(FragmentA &a, uint32_t address, int first_row, int first_chunk) {
    ptx::ldmatrix_x4(a, Tile::moved(address, first_row, first_chunk));
}
template <class Tile>
__device__ inline void load_a(FragmentA &a, const Tile &tile, int first_row, int first_chunk) {
    load_a<Tile>(a, address_a(tile), first_row, first_chunk);
}

// B of two neighbouring tiles of 8 columns, stored as one row per column: 16 rows from `first_row`.
template <class Tile>
__device__ inline void load_b(FragmentB (&b)[2], uint32_t address, int first_row, int first_chunk) {
    uint32_t registers[4];
    ptx::ldmatrix_x4(registers, Tile::moved(address, first_row, first_chunk));
#pragma unroll
    for (int i = 0; i < 4; ++i) b[i / 2][i % 2] = registers[i];
}
template <class Tile>
__device__ inline void load_b(FragmentB (&b)[2], const Tile &tile, int first_row, int first_chunk) {
    load_b<Tile>(b, address_b(tile), first_row, first_chunk);
}

// The same for 16-bit elements stored as one row per k: 16 rows from `first_row`, the two chunks (16 columns) from
// `first_chunk`.
template <class Tile>
__device__ inline void load_b_transposed(FragmentB (&b)[2], uint32_t address, int first_row, int first_chunk) {
    uint32_t registers[4];
    ptx::ldmatrix_x4_trans(registers, Tile::moved(address, first_row, first_chunk));
#pragma unroll
    for (int i = 0; i < 4; ++i) b[i / 2][i % 2] = registers[i];
}
template <class Tile>
__device__ inline void load_b_transposed(FragmentB (&b)[2], const Tile &tile, int first_row, int first_chunk) {
    load_b_transposed<Tile>(b, address_b_transposed(tile), first_row, first_chunk);
}

// c += A B of 16-bit elements.
__device__ inline void multiply(Accumulator &c, const FragmentA &a, const FragmentB &b, __nv_bfloat16) {
    ptx::mma_m16n8k16_bf16(c, a, b);
}
__device__ inline void multiply(Accumulator &c, const FragmentA &a, const FragmentB &b, __half) {
    ptx::mma_m16n8k16_f16(c, a, b);
}

__device__ inline uint32_t rounded_pair(float high, float low, __nv_bfloat16) {
    return ptx::cvt_rn_bf16x2_f32(high, low);
}
__device__ inline uint32_t rounded_pair(float high, float low, __half) { return ptx::cvt_rn_f16x2_f32(high, low); }

// Two neighboring accumulators, rounded to 16 bits, as A of a following MMA whose k runs along their 16 columns. Each
// lane already holds its own elements.
template <class Element>
__device__ inline void accumulators_to_a(FragmentA &a, const Accumulator &left, const Accumulator &right, Element) {
    a[0] = rounded_pair(left[1], left[0], Element{});
    a[1] = rounded_pair(left[3], left[2], Element{});
    a[2] = rounded_pair(right[1], right[0], Element{});
    a[3] = rounded_pair(right[3], right[2], Element{});
}

// A reduction of one value over the four lanes that hold a row of an accumulator.
template <class Combine>
__device__ inline float reduce_row(float value, Combine combine) {
    value = combine(value, ptx::shfl_sync_bfly_f32(value, 1));
    return combine(value, ptx::shfl_sync_bfly_f32(value, 2));
}

// The bits that are set in any of the eight lanes that hold the same columns of an accumulator.
__device__ inline uint32_t bits_of_columns(uint32_t bits) {
    bits |= ptx::shfl_sync_bfly_b32(bits, 4);
    bits |= ptx::shfl_sync_bfly_b32(bits, 8);
    return bits | ptx::shfl_sync_bfly_b32(bits, 16);
}

// A times a pair of equal factors, powers of two: exact, as long as the products are normal numbers.
__device__ inline void scale_a(FragmentA &a, uint32_t factors, __nv_bfloat16) {
    constexpr uint32_t minus_zeros = 0x80008000u;   // which, unlike zeros, keep the sign of any product
#pragma unroll
    for (uint32_t &pair : a) pair = ptx::fma_rn_bf16x2(pair, factors, minus_zeros);
}
__device__ inline void scale_a(FragmentA &, uint32_t, __half) {}

}   // namespace tile
