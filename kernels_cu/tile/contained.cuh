// Codes of 4 bits as operands of MMAs of 8-bit containers, a byte of a register each.
#pragma once

#include <cstdint>

#include "../ptx/ldmatrix.cuh"
#include "fragment.cuh"

namespace tile {

// B of two neighbouring tiles of 8 columns in e2m1, stored as one row per column: 16 rows from `first_row`, the two
// chunks from `first_chunk`. A chunk has 16 codes in its first 8 bytes; the others are not read. `address` is that of
// address_b().
template <class Tile>
__device__ inline void load_contained_b(FragmentB (&b)[2], uint32_t address, int first_row, int first_chunk) {
    uint32_t registers[4];
    ptx::ldmatrix_m8n16_x4_b8x16_b4x16_p64(registers, Tile::moved(address, first_row, first_chunk));
#pragma unroll
    for (int i = 0; i < 4; ++i) b[i / 2][i % 2] = registers[i] << 2;   // e2m1 stands in bits 5..2 of its container
}

}   // namespace tile
