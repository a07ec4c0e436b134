// Reads a finished tile of keys: codes, eight at a time, and their scales.
#pragma once

#include <cstdint>

#include "block_tiles.cuh"
#include "narrow.cuh"

namespace tile {

// Eight codes of a row from `column` on, a multiple of 8, and the byte of the scale that they share.
template <class Tile>
__device__ inline Codes<Tile::Format::bits> codes_of(const Tile &tile, int row, int column) {
    Codes<Tile::Format::bits> codes;
    const int byte = column * Tile::Format::bits / 8;
    const uint32_t *source =
        reinterpret_cast<const uint32_t *>(&tile.chunks[Tile::index(row, byte / 16)]) + byte / 4 % 4;
#pragma unroll
    for (int i = 0; i < codes.words; ++i) codes.word[i] = __ldg(source + i);
    return codes;
}
template <class Tile>
__device__ inline uint32_t scale_of(const Tile &tile, int row, int column) {
    return __ldg(reinterpret_cast<const uint8_t *>(tile.scales[row]) + column / Tile::Format::block);
}

}   // namespace tile
