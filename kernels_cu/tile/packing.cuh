// How the threads of a block share the packing of a tile of keys or values: the values of a thread, and the places of
// their codes and scales.
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

// A block of `block` values, `lane_values` in each of its neighboring lanes.
template <int block, int lane_values>
struct Blocks {
    static constexpr int groups = lane_values / 8;   // of eight values that a lane has
    static constexpr int lanes = block / lane_values;

    __device__ static float amax(float value) {
#pragma unroll
        for (int mask = 1; mask < lanes; mask *= 2)
            value = ptx::max_nan_f32(value, ptx::shfl_sync_bfly_f32(value, mask));
        return value;
    }
};

// Threads that pack on one multiprocessor: while some compute, the loads of others are in flight.
constexpr int packing_threads = 1024;
// The number of blocks of `threads` threads for that. Every multiprocessor holds 16 blocks.
constexpr int packing_blocks(int threads) { return threads < packing_threads / 16 ? 16 : packing_threads / threads; }

// The values of a tile as loaded, not swizzled: a warp writes along the row.
template <class Element, int keys, int dim>
struct alignas(16) Staged {
    Element values[keys][dim];

    // Starts loading, by `threads` threads. The values are complete after cp_async_wait_group and a barrier.
    template <int threads>
    __device__ void load(const Rows<Element> &rows) {
        // A thread loads one column of chunks, with a constant step of rows. Trip counts are constants, which saves the
        // loop counters.
        const auto each = [&](auto width, auto &&body) {
            constexpr int row_threads = dim / width, step = threads / row_threads;
            static_assert(threads % row_threads == 0 && keys % step == 0);
            const int row = threadIdx.x / row_threads, column = threadIdx.x % row_threads * width;
            const Element *source = rows.at(row, column);
            constexpr bool copies = width > 1;
#pragma unroll(copies ? keys / step : 4)
            for (int i = 0; i < keys / step; ++i, source += step * rows.stride)
                body(values[row + i * step][column], source, rows.holds(row + i * step, column));
        };
        if (rows.aligned) {
            each(std::integral_constant<int, elements_per_chunk<Element>>{},
                 [](Element &target, const Element *source, bool present) {
                     ptx::cp_async_cg_16(static_cast<uint32_t>(__cvta_generic_to_shared(&target)), source, present);
                 });
        } else {
            each(std::integral_constant<int, 1>{}, [](Element &target, const Element *source, bool present) {
                target = present ? *source : Element(0.0f);
            });
        }
    }
};

// The number of rows, a power of two, that `threads` threads load at once, with `row_threads` each.
constexpr int rows_at_once(int threads, int row_threads, int rows) {
    while (rows * row_threads > threads) rows /= 2;
    return rows;
}

// Threads along rows of `dim` values: each has `lane_values` consecutive values of `items` rows, `step` rows apart.
template <int rows, int dim, int lane_values, int step_ = rows / 4>
struct RowPacking {
    static constexpr int step = step_, items = rows / step;
    static constexpr int row_threads = dim / lane_values, threads = step * row_threads;

    __device__ static int row() { return threadIdx.x / row_threads; }
    __device__ static int column() { return threadIdx.x % row_threads * lane_values; }
};

// The threads that write a KeyTile. One or two lanes have the values of a block, and each computes its scale.
template <class Tile, int step_ = Tile::keys / 4>
struct KeyPacking : RowPacking<Tile::keys, Tile::dim, 16, step_> {
    using Format = typename Tile::Format;
    using Rows = RowPacking<Tile::keys, Tile::dim, 16, step_>;
    using Blocks = tile::Blocks<Format::block, 16>;
    // Blocks of a multiprocessor. NVFP4 codes of values minus a mean need more registers.
    static constexpr int blocks = packing_blocks(Rows::threads) * (Format::block == 16 ? 3 : 4) / 4;
    using Rows::column, Rows::row, Rows::step;

    __device__ static int first_of_block() { return column() / Format::block * Format::block; }

    // The values of one of this thread's rows.
    template <class Element>
    __device__ static void unpack(const Staged<Element, Tile::keys, Tile::dim> &staged, int item,
                                  float (&values)[Blocks::groups][8]) {
#pragma unroll
        for (int group = 0; group < Blocks::groups; ++group) {
            Eight<Element> eight;
            const uint4 *source =
                reinterpret_cast<const uint4 *>(&staged.values[row() + item * step][column() + 8 * group]);
#pragma unroll
            for (int i = 0; i < Eight<Element>::chunks; ++i) eight.chunk[i] = source[i];
            eight.unpack(values[group]);
        }
    }

    __device__ static void put(Tile &tile, int item, const Codes<Format::bits> (&codes)[Blocks::groups],
                               uint32_t scale) {
        static_assert((step & (step - 1)) == 0,
                      "a row number is the exclusive or of its parts, as place and swizzle want it");
        const int byte = column() * Format::bits / 8,
                  chunk = byte / 16 ^ Tile::swizzle(row()) ^ Tile::swizzle(item * step),
                  place = Tile::power == 1 ? Tile::place(row()) ^ Tile::place(item * step) : row() + item * step;
        uint4 *target = &tile.chunks[place * Tile::row_chunks + chunk];
        if constexpr (Format::bits == 8)
            *target = {codes[0].word[0], codes[0].word[1], codes[1].word[0], codes[1].word[1]};
        else reinterpret_cast<uint2 *>(target)[byte / 8 % 2] = {codes[0].word[0], codes[1].word[0]};
        uint8_t *scales = reinterpret_cast<uint8_t *>(tile.scales[row() + item * step]);
        if (column() == first_of_block()) scales[column() / Format::block] = scale;
        if constexpr (Tile::dim / Format::block % 4 != 0) {   // bytes of the last word that belong to no block are zero
            if (column() == Tile::dim - 16)
                for (int i = Tile::dim / Format::block; i < 4 * Tile::words; ++i) scales[i] = 0;
        }
    }
};

// The threads that write a ValueTile: each has a column.
template <class Tile>
struct ValuePacking {
    using Format = typename Tile::Format;
    using Blocks = tile::Blocks<Format::block, Format::block>;
    static constexpr int threads = Tile::dim_v, items = Tile::keys / Format::block;   // blocks of a thread
    static constexpr int blocks = packing_blocks(threads);                            // of a multiprocessor

    __device__ static int column() { return threadIdx.x % 1024; }   // tells the compiler that it is not negative

    // The values of one of this thread's blocks.
    template <class Element>
    __device__ static void unpack(const Staged<Element, Tile::keys, Tile::dim_v> &staged, int block,
                                  float (&values)[Blocks::groups][8]) {
#pragma unroll
        for (int i = 0; i < Format::block; ++i)
            values[i / 8][i % 8] = float(staged.values[block * Format::block + i][column()]);
    }

    // The same as pairs of two keys each, of 16-bit elements.
    template <class Element>
    __device__ static void unpack(const Staged<Element, Tile::keys, Tile::dim_v> &staged, int block,
                                  uint4 (&pairs)[Blocks::groups]) {
        const auto bits = [&](int key) {
            return uint32_t(reinterpret_cast<const uint16_t &>(staged.values[block * Format::block + key][column()]));
        };
        const auto pair = [&](int key) { return __byte_perm(bits(key), bits(key + 1), 0x5410); };
#pragma unroll
        for (int i = 0; i < Blocks::groups; ++i)
            pairs[i] = {pair(8 * i), pair(8 * i + 2), pair(8 * i + 4), pair(8 * i + 6)};
    }

    __device__ static void put(Tile &tile, int block, const Codes<Format::bits> (&codes)[Blocks::groups],
                               uint32_t scale) {
        constexpr int count = Format::block * Format::bits / 32, of_group = Codes<Format::bits>::words;
        uint32_t words[count];
#pragma unroll
        for (int i = 0; i < count; ++i) words[i] = codes[i / of_group].word[i % of_group];
        if constexpr (count == 2) {
            reinterpret_cast<uint2 *>(&tile.codes.at(column(), block / 2))[block % 2] = {words[0], words[1]};
        } else {
#pragma unroll
            for (int i = 0; i < count / 4; ++i)
                tile.codes.at(column(), block * (count / 4) + i) = {words[4 * i], words[4 * i + 1], words[4 * i + 2],
                                                                    words[4 * i + 3]};
        }
        put_scale(tile, column(), block, scale);
    }

    __device__ static void put_scale(Tile &tile, int column, int block, uint32_t scale) {
        reinterpret_cast<uint8_t *>(tile.scales)[Tile::place(column, block)] = scale;
    }

    // Scale bytes that belong to no column are zeros.
    __device__ static void put_rest(Tile &tile) {
        constexpr int whole = Tile::groups * Tile::columns_per_word * 32;
        if constexpr (whole > Tile::dim_v) {
            for (int i = threadIdx.x; i < (whole - Tile::dim_v) * items; i += threads)
                put_scale(tile, Tile::dim_v + i / items, i % items, 0);
        }
    }
};

// Copies a finished tile from shared to global memory, by `threads` threads, after a barrier.
template <int threads, class Tile>
__device__ inline void copy_out(const Tile &tile, void *target) {
    static_assert(sizeof(Tile) % 16 == 0, "whole chunks");
    constexpr int chunks = sizeof(Tile) / 16;
    const uint4 *source = reinterpret_cast<const uint4 *>(&tile) + threadIdx.x;
    uint4 *first = static_cast<uint4 *>(target) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < ceil_div(chunks, threads) * threads; i += threads)
        if (chunks - i >= threads || threadIdx.x < chunks - i) first[i] = source[i];
}

}   // namespace tile
