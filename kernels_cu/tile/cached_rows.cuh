// Keys and values as caches and operands hold them, 16 keys at a time in shared memory: a unit. In 16 bits a unit is a
// SharedTile; in block formats it is codes and scales as they came, which a warp expands to a SharedTile, code times
// scale, every product exact. So MMAs have one kind of operand, and caches of the same values give the same sums, bit
// for bit.
//
// A unit is 16 rows of one token each, whose scales lie along them. Values of an operand in a block format stand in
// tiles of 64 keys whose rows are columns of V, their scales along the keys: there a unit is a quarter of the columns.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "../kernel.cuh"
#include "../ptx/barrier.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/cvt.cuh"
#include "../ptx/target.cuh"
#include "../ptx/warp.cuh"
#include "block_tiles.cuh"
#include "format.cuh"
#include "fragment.cuh"
#include "shared.cuh"

namespace tile {

constexpr int cached_rows = 16;   // keys of a unit

// Bytes of shared memory that a warp of attention of few queries has to itself: two blocks of four fit a
// multiprocessor, of heads of up to 128, and where they leave room rings hide the way from memory of a Hopper.
template <int dim>
constexpr int few_arena_bytes = dim <= 128 && ptx::shared_bytes_per_block <= 128 * 1024 ? 11520 : 23040;

// What rows hold, as entries' scalars name it: values of 16 bits as they are, or codes with scales.
enum class RowFormat { plain, mxfp8, mxfp4, nvfp4 };

__device__ inline int bits_of(RowFormat format) {
    return format == RowFormat::plain ? 16 : format == RowFormat::mxfp8 ? 8 : 4;
}
// Blocks of `values` values, a part of one for a whole one.
__device__ inline int blocks_of(RowFormat format, int values) {
    return format == RowFormat::nvfp4 ? (values + 15) >> 4 : (values + 31) >> 5;
}

// What takes expanded values to those that they stand for.
__device__ inline float lift_of(RowFormat format) { return format == RowFormat::nvfp4 ? 0x1p7f : 1.0f; }

__device__ inline uint32_t multiply_pair(uint32_t a, uint32_t b, __nv_bfloat16) { return ptx::mul_bf16x2(a, b); }
__device__ inline uint32_t multiply_pair(uint32_t a, uint32_t b, __half) { return ptx::portable::mul_f16x2(a, b); }

// A word of eight e2m1 codes as pairs of Element, in order, times pairs of equal factors: its bits stand where those of
// a 16-bit float with its exponent and mantissa are, sign on sign, the other three from the lowest bit of the exponent
// but one on.
template <class Element, class... Factors>
__device__ inline uint4 e2m1_times(uint32_t word, Factors... factors) {
    constexpr int mantissa = is_bf16<Element> ? 7 : 10;
    constexpr uint32_t magnitude = 0x00070007u << (mantissa - 1), sign = 0x80008000u;
    uint32_t pairs[4];   // nibble j of both halves of the word
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const int up = mantissa - 1 - 4 * j;
        const uint32_t moved = up >= 0 ? word << (up > 0 ? up : 0) : word >> (up < 0 ? -up : 0);
        pairs[j] = (moved & magnitude) | ((word << (12 - 4 * j)) & sign);
        ((pairs[j] = multiply_pair(pairs[j], factors, Element{})), ...);
    }
    return {__byte_perm(pairs[0], pairs[1], 0x5410), __byte_perm(pairs[2], pairs[3], 0x5410),
            __byte_perm(pairs[0], pairs[1], 0x7632), __byte_perm(pairs[2], pairs[3], 0x7632)};
}

// The block formats. block: values to a scale; chunk_values: of 16 bytes of codes. expand() makes chunk `eight` of the
// eights of a chunk of codes; scale() makes of a scale's byte what it takes.

// e2m1 times ue4m3: values times 2^-7, of which f16 and bf16 hold every one.
template <class Element>
struct CachedNvfp4 {
    static constexpr int bits = 4, block = 16, chunk_values = 32;

    __device__ static uint32_t scale(uint32_t byte) {
        const uint32_t pair = ptx::cvt_rn_f16x2_ue4m3x2(byte * 0x101u);
        if constexpr (is_bf16<Element>) {   // e2m1 stands for 2^-126 times itself there
            const float value = unpack_pair(pair, __half{}).x * 0x1p119f;
            return ptx::cvt_rn_bf16x2_f32(value, value);
        } else {   // 2^-14
            return multiply_pair(pair, 0x58005800u, __half{});
        }
    }
    __device__ static uint4 expand(const uint32_t (&words)[4], int eight, uint32_t scale) {
        return e2m1_times<Element>(words[eight], scale);
    }
};

// e2m1 times ue8m0, in bf16: exact for scales from 2^-117 to 2^119.
struct CachedMxfp4 {
    static constexpr int bits = 4, block = 32, chunk_values = 32;

    __device__ static uint32_t scale(uint32_t byte) { return ptx::cvt_rn_bf16x2_ue8m0x2(byte * 0x101u); }
    __device__ static uint4 expand(const uint32_t (&words)[4], int eight, uint32_t scale) {
        return e2m1_times<__nv_bfloat16>(words[eight], 0x7e807e80u, scale);   // 2^126
    }
};

// e4m3 times ue8m0, in bf16, likewise.
struct CachedMxfp8 {
    static constexpr int bits = 8, block = 32, chunk_values = 16;

    __device__ static uint32_t scale(uint32_t byte) { return ptx::cvt_rn_bf16x2_ue8m0x2(byte * 0x101u); }
    __device__ static uint4 expand(const uint32_t (&words)[4], int eight, uint32_t scale) {
        uint32_t pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t codes = words[2 * eight + i / 2] >> (16 * (i % 2)) & 0xffffu;
            const float2 values = unpack_pair(ptx::cvt_rn_f16x2_e4m3x2(codes), __half{});
            pairs[i] = ptx::mul_bf16x2(ptx::cvt_rn_bf16x2_f32(values.y, values.x), scale);
        }
        return {pairs[0], pairs[1], pairs[2], pairs[3]};
    }
};

// The block format that a RowFormat names, of those that Element holds: calls body(Format{}).
template <class Element, class Body>
__device__ inline void with_block_format(RowFormat format, Body &&body) {
    if constexpr (is_bf16<Element>) {
        if (format == RowFormat::mxfp8) return body(CachedMxfp8{});
        if (format == RowFormat::mxfp4) return body(CachedMxfp4{});
    }
    body(CachedNvfp4<Element>{});
}

// How V's scales stand in a tile of block_tiles.cuh: groups of 32 words, `of_word` groups of 32 columns to each.
struct ValueScales {
    int steps, shift;   // MMAs deep; 2^shift columns have a group

    __device__ explicit ValueScales(RowFormat format)
        : steps(format == RowFormat::mxfp8 ? 2 : 1), shift(format == RowFormat::nvfp4   ? 5
                                                           : format == RowFormat::mxfp4 ? 6
                                                                                        : 7) {}
    __device__ int group(int column) const { return column >> shift; }
    // The groups that `columns` columns lie in, from group(the first) on.
    __device__ int groups(int columns) const { return (columns + (1 << shift) - 1) >> shift; }
};

// Where the rows of a tile of block_tiles.cuh stand that are tokens: KeyTile, or SharedTile of values in 16 bits.
struct TileRows {
    int chunks, power;
    bool keys;

    __device__ TileRows(int row_bytes, bool keys)
        : chunks(row_bytes / 16), power(chunks % 8 == 0           ? 3
                                        : chunks % 4 == 0         ? 2
                                        : chunks % 2 == 0 || keys ? 1
                                                                  : 0),
          keys(keys) {}
    __device__ int index(int row, int chunk) const {
        const int near = row >> (3 - power), far = keys ? (row >> 3 & 3) << (power > 2 ? 1 : 0) : 0;
        return row * chunks + (chunk ^ ((near ^ far) & ((1 << power) - 1)));
    }
};

// Units of heads of `dim` values, filled up with zeros.
template <class Element_, int dim_>
struct CachedUnits {
    using Element = Element_;
    static constexpr int dim = dim_, quarter = dim / 4;
    static_assert(dim % 64 == 0, "a quarter of the columns is two tiles of MMAs");
    using Rows = SharedTile<cached_rows, 2 * dim>;        // in 16 bits: a row is a token
    using Columns = SharedTile<quarter, 2 * tile_keys>;   // a row is a column of V

    // Chunks of codes of a unit, and of a row that is a token; bytes from a token's scales to the next one's.
    __device__ static int chunks(RowFormat format) { return dim * bits_of(format) / 8; }
    __device__ static int row_chunks(RowFormat format) { return dim * bits_of(format) / 128; }
    __device__ static int scale_step(RowFormat format) { return max(blocks_of(format, dim), 4); }

    // Bytes of a unit in shared memory, a multiple of what swizzles need.
    __device__ static int bytes(RowFormat format, bool columns) {
        if (format == RowFormat::plain) return sizeof(Rows);
        const ValueScales scales(format);
        const int of_scales = columns ? 128 * scales.steps * scales.groups(quarter) : cached_rows * scale_step(format);
        return ceil_div(16 * chunks(format) + of_scales, 128) * 128;
    }

    // Starts copying codes of 16 tokens: source(row, chunk) is where a chunk stands, null for zeros.
    template <class Source>
    __device__ static void copy_rows(uint32_t unit, RowFormat format, Source &&source) {
        const int log = 31 - __clz(row_chunks(format)), count = cached_rows << log;
#pragma unroll 2
        for (int i = ptx::laneid(); i < count; i += 32) {
            const int row = i >> log, chunk = i & ((1 << log) - 1);
            const char *from = source(row, chunk);
            const int at = format == RowFormat::plain ? Rows::index(row, chunk) : i;
            ptx::cp_async_cg_16(unit + 16 * at, from, from != nullptr);
        }
    }

    // Starts copying their scales, `present` bytes of each: source(row) is where they begin, null for zeros, at
    // multiples of 4 where `aligned`; otherwise they are copied before this returns.
    template <class Source>
    __device__ static void copy_scales(char *unit, RowFormat format, int present, bool aligned, Source &&source) {
        const int step = scale_step(format), log = 31 - __clz(step);   // a power of two
        char *scales = unit + 16 * chunks(format);
        const uint32_t target = static_cast<uint32_t>(__cvta_generic_to_shared(scales));
        if (aligned) {
#pragma unroll 1
            for (int i = ptx::laneid(); i < cached_rows << (log - 2); i += 32) {
                const int row = i >> (log - 2), word = i & ((step >> 2) - 1);
                const char *from = source(row);
                ptx::cp_async_ca<4>(target + 4 * i, from + (from ? 4 * word : 0),
                                    from ? max(min(present - 4 * word, 4), 0) : 0);
            }
        } else {
#pragma unroll 1
            for (int i = ptx::laneid(); i < cached_rows * step; i += 32) {
                const int row = i >> log, byte = i & (step - 1);
                const char *from = source(row);
                scales[i] = from && byte < present ? from[byte] : 0;
            }
        }
    }

    // Starts copying the quarter `part` of the columns of a tile of V that has tile_dim of them, with their scales.
    __device__ static void copy_columns(uint32_t unit, RowFormat format, const char *tile, int part, int tile_dim) {
        const int count = chunks(format), row_chunks = tile_keys * bits_of(format) / 128, first = part * count;
#pragma unroll 2
        for (int i = ptx::laneid(); i < count; i += 32)
            ptx::cp_async_cg_16(unit + 16 * i, tile + 16 * (first + i), first + i < tile_dim * row_chunks);
        const ValueScales scales(format);
        const int groups = scales.groups(quarter), there = scales.groups(tile_dim), i = ptx::laneid();   // one or two
        if (i < 8 * scales.steps * groups) {
            const int step = groups == 2 ? i / 16 : i / 8,
                      group = scales.group(part * quarter) + (groups == 2 ? i / 8 % 2 : 0);
            ptx::cp_async_cg_16(unit + 16 * (count + i),
                                tile + 16 * (tile_dim * row_chunks + 8 * (step * there + group) + i % 8),
                                group < there);
        }
    }

    // Codes and scales of 16 tokens to 16 bits.
    template <class Format>
    __device__ static void expand_rows(Rows &to, const char *unit, Format) {
        constexpr int row_chunks = dim * Format::bits / 128, count = cached_rows * row_chunks,
                      eights = Format::chunk_values / 8;
        constexpr int step = dim / Format::block > 4 ? dim / Format::block : 4;
        const uint8_t *scales = reinterpret_cast<const uint8_t *>(unit) + 16 * count;
        expand_all<Format, count>(to, unit, [&](int i) {
            const int row = i / row_chunks, chunk = i % row_chunks,
                      block = chunk * Format::chunk_values / Format::block;
            return Chunk{row,
                         chunk * eights,
                         {scales[row * step + block], scales[row * step + block + (scales_of_chunk<Format> > 1)]}};
        });
    }

    // Those of the quarter `part` of the columns of a tile of V.
    template <class Format>
    __device__ static void expand_columns(Columns &to, const char *unit, int part, Format) {
        constexpr int row_chunks = tile_keys * Format::bits / 128, count = quarter * row_chunks,
                      eights = Format::chunk_values / 8;
        constexpr int depth = Format::bits == 8 ? 32 : 64, step_blocks = depth / Format::block,
                      of_word = 4 / step_blocks;
        constexpr int groups = ceil_div(dim, 4 * 32 * of_word);
        using Codes = SharedTile<quarter, tile_keys * Format::bits / 8>;
        const uint8_t *scales = reinterpret_cast<const uint8_t *>(unit) + 16 * count;
        const int first_group = part * quarter / (32 * of_word);
        expand_all<Format, count>(to, unit, [&](int i) {
            const int row = i / row_chunks,
                      chunk = Codes::index(row, i % row_chunks) - row * row_chunks;   // its own inverse
            const int column = part * quarter + row, j = column / 8, lane = 4 * (column % 8) + j % 4;
            const auto scale = [&](int of_chunk) -> uint32_t {
                const int block = chunk * Format::chunk_values / Format::block + of_chunk;
                const int word = (block / step_blocks * groups + j / 4 / of_word - first_group) * 32 + lane;
                return scales[4 * word + j / 4 % of_word * step_blocks + block % step_blocks];
            };
            return Chunk{row, chunk * eights, {scale(0), scale(scales_of_chunk<Format> > 1)}};
        });
    }

private:
    template <class Format>
    static constexpr int scales_of_chunk =
        Format::chunk_values > Format::block ? Format::chunk_values / Format::block : 1;

    // Where a chunk of codes goes, and the bytes of its scales.
    struct Chunk {
        int row, first;
        uint32_t scale[2];
    };

    // All chunks of codes of a unit to 16 bits, as place_of(i) says. A warp reads what it expands before it writes,
    // several chunks of a lane at once: all of them up to dim 128, where `to` may be where the unit is.
    template <class Format, int count, class Tile, class PlaceOf>
    __device__ static void expand_all(Tile &to, const char *unit, PlaceOf &&place_of) {
        constexpr int eights = Format::chunk_values / 8, of_block = Format::block / 8, of_lane = count / 32,
                      at_once = dim <= 128 ? of_lane : 2;
        static_assert(count % 32 == 0 && of_lane % at_once == 0, "whole rounds");
#pragma unroll 1
        for (int first = 0; first < of_lane; first += at_once) {
            uint4 codes[at_once];
            Chunk places[at_once];
#pragma unroll
            for (int i = 0; i < at_once; ++i) {
                const int at = 32 * (first + i) + ptx::laneid();
                codes[i] = reinterpret_cast<const uint4 *>(unit)[at];
                places[i] = place_of(at);
            }
            ptx::bar_warp_sync();   // every lane has read its chunks and scales
#pragma unroll
            for (int i = 0; i < at_once; ++i) {
                const uint32_t words[4] = {codes[i].x, codes[i].y, codes[i].z, codes[i].w};
                uint32_t scale = 0;
#pragma unroll
                for (int eight = 0; eight < eights; ++eight) {
                    if (eight % of_block == 0) scale = Format::scale(places[i].scale[eight / of_block]);
                    to.at(places[i].row, places[i].first + eight) = Format::expand(words, eight, scale);
                }
            }
        }
    }
};

// Which of `units` units a lane knows about, and what it knows, for all lanes.
template <int units>
__device__ inline int lane_unit() {
    return ptx::laneid() % units;
}
__device__ inline int of_unit(int value, int unit) { return ptx::shfl_sync_idx_b32(value, unit); }

// Bits of B of 16 keys that belong to those of which seen(key) is true.
struct PairMasks {
    uint32_t pair[2];
};
template <class Seen>
__device__ inline PairMasks pair_masks(Seen &&seen) {
    PairMasks masks;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int key = 8 * half + 2 * (ptx::laneid() % 4);
        masks.pair[half] = (seen(key) ? 0x0000ffffu : 0) | (seen(key + 1) ? 0xffff0000u : 0);
    }
    return masks;
}

// A of Q: row_of(row) is where one of 16 rows begins, null for zeros, of which `columns` values are there, a multiple
// of eight.
template <class Element, int dim, class RowOf>
__device__ inline void load_queries(FragmentA (&a)[dim / 16], int columns, RowOf &&row_of) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const Element *row = row_of(accumulator_row(2 * half));
#pragma unroll
        for (int eight = 0; eight < dim / 8; ++eight) {
            const int column = 8 * eight + accumulator_column(0);
            a[eight / 2][2 * (eight % 2) + half] =
                row && column < columns ? __ldg(reinterpret_cast<const uint32_t *>(row + column)) : 0;
        }
    }
}

__device__ inline void copy(Accumulator &to, const Accumulator &from) {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = from[i];
}

// The accumulators of a warp in shared memory, for another warp.
template <int columns>
struct WarpNode {
    static constexpr int tiles = columns / mma_columns;
    float4 o[tiles][32];
    float max[2][32], sum[2][32];

    __device__ float4 &accumulator(int j) { return o[j][ptx::laneid()]; }
    __device__ float &row_max(int half) { return max[half][ptx::laneid()]; }
    __device__ float &row_sum(int half) { return sum[half][ptx::laneid()]; }
};

}   // namespace tile
