// Codes and scales of another quantizer, arranged in tiles of keys or values.
#pragma once

#include <cstdint>

#include "../kernel.cuh"

namespace op {

constexpr int tile_codes_threads = 256;
constexpr int tile_codes_bytes = 4 * tile_codes_threads;   // of a block of threads

// The source of a byte of a tile: kind << 28 | row << 12 | column in the tile's codes (kind 1) or scales (kind 2); 0
// for none.
struct TileSource {
    int kind, row, column;

    __device__ explicit TileSource(int word) : kind(word >> 28), row(word >> 12 & 0xffff), column(word & 0xfff) {}
};

// Bytes [batch, heads, rows, columns] at any strides, `tile_rows` rows to a tile. `missing` stands for bytes outside.
struct PlainBytes {
    const uint8_t *bytes;
    long long batch, head, row;
    int rows, columns, tile_rows;
    uint8_t missing;

    __device__ uint8_t at(const TileSource &source, int tile) const {
        const int from = tile * tile_rows + source.row;
        if (!bytes || from >= rows || source.column >= columns) return missing;
        return bytes[blockIdx.z * batch + blockIdx.y * head + from * row + source.column];
    }
};

// The grid is bytes of the tiles of a head, heads, batches.
__device__ inline void tile_codes(const PlainBytes &codes, const PlainBytes &scales, const int *sources, uint8_t *tiles,
                                  int heads, int count, int tile_bytes) {
    const uint32_t item = blockIdx.x * tile_codes_threads + threadIdx.x;   // of four bytes
    const int tile = item / (tile_bytes / 4), first = item % (tile_bytes / 4) * 4;
    if (tile >= count) return;
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const TileSource source(sources[first + i]);
        const uint8_t byte = source.kind == 1   ? codes.at(source, tile)
                             : source.kind == 2 ? scales.at(source, tile)
                                                : uint8_t(0);
        word |= uint32_t(byte) << (8 * i);
    }
    uint8_t *target = tiles + ((size_t(blockIdx.z) * heads + blockIdx.y) * count + tile) * tile_bytes + first;
    *reinterpret_cast<uint32_t *>(target) = word;
}

}   // namespace op
