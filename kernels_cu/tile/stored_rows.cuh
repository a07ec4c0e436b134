// Accumulators as rows of 16-bit elements in shared memory.
#pragma once

#include <cstdint>

#include "fragment.cuh"

namespace tile {

// Whether store_rounded() takes few instructions: with stmatrix.
constexpr bool stores_quickly = ptx::has_stmatrix;

// Stores two neighboring accumulators, rounded to 16 bits: 16 rows of a tile from `first_row` on, two chunks from
// `first_chunk` on. address: this lane's, as of address_a. Rows are a multiple of 8, chunks are even.
template <class Tile, class Element>
__device__ inline void store_rounded(const Accumulator (&pair)[2], uint32_t address, int first_row, int first_chunk,
                                     Element element) {
    FragmentA a;
    accumulators_to_a(a, pair[0], pair[1], element);
    ptx::stmatrix_x4(Tile::moved(address, first_row, first_chunk), a);
}

}   // namespace tile
