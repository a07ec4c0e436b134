// How a block of threads shares the work of writing a tile of keys or of values: which values a thread has, and where it
// puts their codes and scales.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../kernel.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/math.cuh"
#include "../ptx/warp.cuh"
#include "block_tiles.cuh"
#include "format.cuh"
#include "narrow.cuh"
#include "rows.cuh"
#include "shared.cuh"

namespace tile {

// A block of `block` values, `lane_values` to each of some neighbouring lanes.
template <int block, int lane_values>
struct Blocks {
    static constexpr int groups = lane_values / 8;   // of eight values that a lane has
    static constexpr int lanes = block / lane_values;

    __device__ static float amax(float value) {
#pragma unroll
        for (int mask = 1; mask < lanes; mask *= 2) value = ptx::max_nan_f32(value, ptx::shfl_sync_bfly_f32(value, mask));
        return value;
    }
};

// Threads that pack on one multiprocessor: while some compute, the values of others are on their way.
constexpr int packing_threads = 1024;

// The threads that work along rows of `dim` values: each has `lane_values` neighbouring ones of `items` rows.
template <int rows, int dim, int lane_values = 8, int items_ = 4>
struct RowPacking {
    static constexpr int items = items_, step = rows / items;   // rows between two items of a thread
    static constexpr int row_threads = dim / lane_values, threads = step * row_threads;

    __device__ static int row() { return threadIdx.x / row_threads; }
    __device__ static int column() { return threadIdx.x % row_threads * lane_values; }
};

// The threads that write a KeyTile. The values of a block are one lane's or two's, so that its scale is worked out once or
// twice; those of `ahead` rows are on their way at once.
template <class Tile, class Element>
struct KeyPacking : RowPacking<Tile::keys, Tile::dim, 16> {
    using Format = typename Tile::Format;
    using Rows = RowPacking<Tile::keys, Tile::dim, 16>;
    static constexpr int lane_values = 16, ahead = 4 / sizeof(Element);
    static constexpr int fitting = (Format::block == 16 ? 5 : 6) * packing_threads / 8 / Rows::threads, blocks = fitting < 16 ? fitting : 16;   // of a multiprocessor
    using Blocks = tile::Blocks<Format::block, lane_values>;
    using Rows::column;

    __device__ static int first_of_block() { return column() / Format::block * Format::block; }

    __device__ static void put(Tile &tile, int row, const Codes<Format::bits> (&codes)[Blocks::groups], uint32_t scale) {
        const int byte = column() * Format::bits / 8;
        uint8_t *target = reinterpret_cast<uint8_t *>(&tile.at(row, byte / 16)) + byte % 16;
        if constexpr (Format::bits == 8)
            *reinterpret_cast<uint4 *>(target) = {codes[0].word[0], codes[0].word[1], codes[1].word[0], codes[1].word[1]};
        else *reinterpret_cast<uint2 *>(target) = {codes[0].word[0], codes[1].word[0]};
        uint8_t *scales = reinterpret_cast<uint8_t *>(tile.scales[row]);
        const int block = column() / Format::block;
        if (column() == first_of_block()) scales[block] = scale;
        if constexpr (Tile::dim / Format::block % 4 != 0) {   // bytes of the last word that belong to no block are zero
            if (column() == Tile::dim - lane_values)
                for (int i = Tile::dim / Format::block; i < 4 * Tile::words; ++i) scales[i] = 0;
        }
    }
};

// The threads that write a ValueTile: the values pass through shared memory; each thread then has half a column of 64 keys.
template <class Tile, class Element>
struct ValuePacking {
    using Format = typename Tile::Format;
    using Blocks = tile::Blocks<Format::block, Format::block>;
    static constexpr int thread_keys = 32, threads = Tile::keys / thread_keys * Tile::dim_v;
    static constexpr int blocks = packing_threads / threads;            // of a multiprocessor
    static constexpr int thread_blocks = thread_keys / Format::block;   // of values that share a scale
    static constexpr int row_chunks = Tile::dim_v * sizeof(Element) / 16;

    // Rows of values, unchanged and not swizzled: a warp writes and reads them along the row.
    struct alignas(16) Staged {
        Element values[Tile::keys][Tile::dim_v];
    };

    __device__ static int column() { return threadIdx.x % Tile::dim_v; }
    __device__ static int first_key() { return threadIdx.x / Tile::dim_v * thread_keys; }

    // Starts loading; the values are there after cp_async_wait_group and a barrier.
    __device__ static void load(Staged &staged, const Rows<Element> &rows) {
        constexpr int chunk_values = elements_per_chunk<Element>;
        if (rows.aligned) {
            const uint32_t target = static_cast<uint32_t>(__cvta_generic_to_shared(&staged));
#pragma unroll
            for (int i = threadIdx.x; i < Tile::keys * row_chunks; i += threads) {
                const int row = i / row_chunks, column = i % row_chunks * chunk_values;
                const bool present = rows.holds(row, column);
                ptx::cp_async_cg_16(target + 16 * i, present ? rows.at(row, column) : rows.first, present);
            }
        } else {
#pragma unroll 4
            for (int i = threadIdx.x; i < Tile::keys * Tile::dim_v; i += threads) {
                const int row = i / Tile::dim_v, column = i % Tile::dim_v;
                staged.values[row][column] = rows.holds(row, column) ? *rows.at(row, column) : Element(0.0f);
            }
        }
    }

    // The values of one of this thread's blocks.
    __device__ static void unpack(const Staged &staged, int block, float (&values)[Blocks::groups][8]) {
#pragma unroll
        for (int i = 0; i < Format::block; ++i)
            values[i / 8][i % 8] = float(staged.values[first_key() + block * Format::block + i][column()]);
    }

    // The same as pairs of two keys each, of 16-bit elements.
    __device__ static void unpack(const Staged &staged, int block, uint4 (&pairs)[Blocks::groups]) {
        const auto pair = [&](int key) {
            const Element *first = &staged.values[first_key() + block * Format::block + key][column()];
            return reinterpret_cast<const uint16_t &>(first[0]) | uint32_t(reinterpret_cast<const uint16_t &>(first[Tile::dim_v])) << 16;
        };
#pragma unroll
        for (int i = 0; i < Blocks::groups; ++i) pairs[i] = {pair(8 * i), pair(8 * i + 2), pair(8 * i + 4), pair(8 * i + 6)};
    }

    __device__ static void put(Tile &tile, int block, const Codes<Format::bits> (&codes)[Blocks::groups], uint32_t scale) {
        constexpr int count = Format::block * Format::bits / 32, of_group = Codes<Format::bits>::words;
        uint32_t words[count];
#pragma unroll
        for (int i = 0; i < count; ++i) words[i] = codes[i / of_group].word[i % of_group];
        const int key = first_key() + block * Format::block, byte = key * Format::bits / 8;
        uint4 *target = &tile.codes.at(column(), byte / 16);
        if constexpr (count == 2) {
            reinterpret_cast<uint2 *>(target)[byte / 8 % 2] = {words[0], words[1]};
        } else {
#pragma unroll
            for (int i = 0; i < count / 4; ++i)
                tile.codes.at(column(), byte / 16 + i) = {words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]};
        }
        put_scale(tile, column(), key / Format::block, scale);
    }

    __device__ static void put_scale(Tile &tile, int column, int block, uint32_t scale) {
        reinterpret_cast<uint8_t *>(tile.scales)[Tile::place(column, block)] = scale;
    }

    // Bytes of scales that belong to no column are zero.
    __device__ static void put_rest(Tile &tile) {
        constexpr int whole = Tile::groups * Tile::columns_per_word * 32, blocks = Tile::keys / Format::block;
        for (int i = threadIdx.x; i < (whole - Tile::dim_v) * blocks; i += threads) put_scale(tile, Tile::dim_v + i / blocks, i % blocks, 0);
    }
};

// A finished tile from shared to global memory, by `threads` threads behind a barrier.
template <int threads, class Tile>
__device__ inline void copy_out(const Tile &tile, void *target) {
    static_assert(sizeof(Tile) % 16 == 0, "whole chunks");
    const uint4 *source = reinterpret_cast<const uint4 *>(&tile);
    for (int i = threadIdx.x; i < int(sizeof(Tile) / 16); i += threads) static_cast<uint4 *>(target)[i] = source[i];
}

}  // namespace tile
