// The places of the scales of rows of blocks in memory: row-major, or in the tiles of cuBLAS and CUTLASS.
#pragma once

#include <cstdint>

namespace tile {

// A tile of the 128x4 layout: 128 rows of 4 blocks, 512 bytes. Tiles are row-major; quarters of 32 rows interleave, so
// that the four scales of a row are an aligned word. Source: cuBLAS documentation, "1D Block Scaling Factors Layout".
constexpr int scale_tile_rows = 128, scale_tile_blocks = 4, scale_tile_bytes = 512;

// The scales of rows with `blocks` blocks each, in one of the two layouts.
struct ScalePlaces {
    int64_t blocks, stride;   // of a row; bytes from row to row, where it is linear
    bool swizzled;

    __device__ int64_t padded_blocks() const {
        return (blocks + scale_tile_blocks - 1) / scale_tile_blocks * scale_tile_blocks;
    }

    __device__ int64_t at(int64_t row, int64_t block) const {
        if (!swizzled) return row * stride + block;
        const int64_t tile = row / scale_tile_rows * (padded_blocks() / scale_tile_blocks) + block / scale_tile_blocks;
        return tile * scale_tile_bytes + row % 32 * 16 + row % scale_tile_rows / 32 * 4 + block % scale_tile_blocks;
    }
};

}   // namespace tile
