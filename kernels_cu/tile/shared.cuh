// Tiles in shared memory: rows of 16-byte chunks, swizzled so that no access pattern used here has bank conflicts.
#pragma once

#include <cstdint>

#include "../ptx/warp.cuh"

namespace tile {

// `rows` rows of `row_bytes` bytes, row_bytes a multiple of 32 (16 would do). Chunk c of row r is stored in place of
// chunk c' of row r. Let 2^a be the largest power of two, at most 8, that divides the chunks of a row; then c' = c ^
// ((r >> (3 - a)) & (2^a - 1)). Consecutive rows are a multiple of 2^a chunks apart, so 2^(3 - a) of them spread over
// the 8 groups of 4 banks without a swizzle, and the exclusive or spreads the next ones. So 8 lanes have no conflicts
// on the same chunk of 8 consecutive rows (ldmatrix, conversion of tiles), nor on 8 consecutive chunks of a row
// (filling of tiles).
template <int rows_, int row_bytes>
struct SharedTile {
    static constexpr int rows = rows_;
    static constexpr int row_chunks = row_bytes / 16;
    static_assert(row_bytes % 16 == 0, "a row is whole 16-byte chunks");

    static constexpr int power = row_chunks % 8 == 0 ? 3 : row_chunks % 4 == 0 ? 2 : row_chunks % 2 == 0 ? 1 : 0;   // a
    static constexpr int swizzled_chunks = 1 << power;

    alignas(16 *
            swizzled_chunks) uint4 chunks[rows * row_chunks];   // so that moved() may work on the bits of an address

    __device__ static int index(int row, int chunk) {
        return row * row_chunks + (chunk ^ (row >> (3 - power) & (swizzled_chunks - 1)));
    }

    __device__ uint4 &at(int row, int chunk) { return chunks[index(row, chunk)]; }
    __device__ const uint4 &at(int row, int chunk) const { return chunks[index(row, chunk)]; }

    // The address in the shared state space, for ldmatrix and cp.async.
    __device__ uint32_t address(int row, int chunk) const {
        return static_cast<uint32_t>(__cvta_generic_to_shared(chunks)) + 16 * index(row, chunk);
    }

    // The address of (row + rows, chunk + chunks) from that of (row, chunk), where `rows` is a multiple of 8 and no bit
    // of chunk % swizzled_chunks is set in `chunks`. With constants that is one exclusive or and an offset of the
    // instruction.
    __device__ static uint32_t moved(uint32_t address, int rows, int chunks) {
        const int swizzled = chunks & (swizzled_chunks - 1);
        return (address ^ (16 * swizzled)) + 16 * (chunks - swizzled + rows * row_chunks);
    }
};

// Calls body(row, chunk) for every chunk of `rows` rows of `chunks` chunks, with consecutive chunks in consecutive
// lanes of a warp.
template <int rows, int chunks, class Body>
__device__ inline void for_chunks_of_warp(Body &&body) {
#pragma unroll 4
    for (int item = ptx::laneid(); item < rows * chunks; item += 32) body(item / chunks, item % chunks);
}

}   // namespace tile
