// Scores of means of queries with keys in tiles: what smoothing of queries removes from scores and attention adds
// again.
#pragma once

#include <cstdint>

#include "../kernel.cuh"
#include "../ptx/barrier.cuh"
#include "../tile/block_tiles.cuh"
#include "../tile/format.cuh"
#include "../tile/fragment.cuh"
#include "../tile/narrow.cuh"
#include "../tile/scale.cuh"
#include "../tile/shared.cuh"
#include "../tile/unpacking.cuh"

namespace op {

constexpr int mean_score_threads = 128;

// Decodes eight codes under one scale. bf16 holds the products of codes and scales exactly.
template <class Narrow>
struct MxDecoder {
    // A scale of NaN becomes infinity: the block's codes are 0, so its values are NaN.
    __device__ static float step(uint32_t scale) { return __uint_as_float(scale == 0 ? 0x400000u : scale << 23); }
    __device__ static void decode(const tile::Codes<Narrow::bits> &codes, float (&values)[8]) {
        Narrow::decode(codes, values);
    }
};

template <class Format>
struct DecoderOf;
template <>
struct DecoderOf<tile::Mxfp8> : MxDecoder<tile::E4m3> {};
template <>
struct DecoderOf<tile::Mxfp4> : MxDecoder<tile::E2m1> {};
template <>
struct DecoderOf<tile::Nvfp4> : MxDecoder<tile::E2m1> {
    __device__ static float step(uint32_t scale) { return tile::nvfp4_step(scale, 1.0f); }
};

// A tile of keys, decoded.
template <class Tile>
using DecodedKeys = tile::SharedTile<Tile::keys, Tile::dim * 2>;

template <class Tile>
__device__ inline void decode_keys(DecodedKeys<Tile> &keys, const Tile &tile) {
    using Format = typename Tile::Format;
    using Decoder = DecoderOf<Format>;
    constexpr int row_eights = Tile::dim / 8;
#pragma unroll 2
    for (int i = threadIdx.x; i < Tile::keys * row_eights; i += mean_score_threads) {
        const int row = i / row_eights, column = i % row_eights * 8;
        const tile::Codes<Format::bits> codes = tile::codes_of(tile, row, column);
        const float step = Decoder::step(tile::scale_of(tile, row, column));
        float values[8];
        Decoder::decode(codes, values);
#pragma unroll
        for (float &value : values) value *= step;
        keys.at(row, column / 8) = tile::pack(values, __nv_bfloat16{});
    }
}

// A of 16 rows of means[rows, cols] from `row` on, columns 16 step .. + 15, as a sum of two: the bf16 values and their
// rounding errors.
__device__ inline void load_means(tile::FragmentA (&a)[2], const float *means, int row, int rows, int cols, int step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int r = row + tile::accumulator_row(2 * (i % 2)),
                  c = 16 * step + 8 * (i / 2) + tile::accumulator_column(0);
        const float *source = means + size_t(r) * cols + c;
        const float low = r < rows && c < cols ? __ldg(source) : 0.0f,
                    high = r < rows && c + 1 < cols ? __ldg(source + 1) : 0.0f;
        a[0][i] = tile::rounded_pair(high, low, __nv_bfloat16{});
        a[1][i] = tile::rounded_pair(high - ptx::high_bf16(a[0][i]), low - ptx::low_bf16(a[0][i]), __nv_bfloat16{});
    }
}

// scores[batch, heads, tiles, blocks, group, 64] = means[batch, heads, group, blocks, cols] times the keys of
// k_tiles[batch, heads, tiles], divided by *q_global unless that is null: scores have the units of products of codes
// and scales, to which global scales are applied later. A block has one tile; the grid is tiles x heads x batch.
template <class Tile>
__device__ inline void mean_scores(DecodedKeys<Tile> &keys, const float *means, const Tile *k_tiles,
                                   const float *q_global, float *scores, int group, int blocks, int cols) {
    // The keys of the tile in 16 bits.
    const size_t head = size_t(blockIdx.z) * gridDim.y + blockIdx.y;
    const int tiles = gridDim.x, rows = group * blocks;
    const float unit = q_global ? __frcp_rn(*q_global) : 1.0f;
    decode_keys(keys, k_tiles[head * tiles + blockIdx.x]);
    ptx::bar_sync();   // the tile is decoded
    means += head * rows * cols;
    scores += (head * tiles + blockIdx.x) * rows * Tile::keys;

    // The scores of all vectors, 16 at a time.
    for (int row = threadIdx.x / 32 * tile::mma_rows; row < rows; row += mean_score_threads / 32 * tile::mma_rows) {
        tile::Accumulator s[Tile::keys / tile::mma_columns] = {};
#pragma unroll 2
        for (int step = 0; step < Tile::dim / 16; ++step) {
            tile::FragmentA a[2];
            load_means(a, means, row, rows, cols, step);
#pragma unroll
            for (int pair = 0; pair < Tile::keys / 16; ++pair) {
                tile::FragmentB b[2];
                tile::load_b(b, keys, 16 * pair, 2 * step);
#pragma unroll
                for (int part = 1; part >= 0; --part)
#pragma unroll
                    for (int half = 0; half < 2; ++half)
                        tile::multiply(s[2 * pair + half], a[part], b[half], __nv_bfloat16{});
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int r = row + tile::accumulator_row(2 * half);
            if (r >= rows) continue;
            const int place = r % blocks * group + r / blocks;
            float *target = scores + size_t(place) * Tile::keys + tile::accumulator_column(0);
#pragma unroll
            for (int j = 0; j < Tile::keys / tile::mma_columns; ++j)
                *reinterpret_cast<float2 *>(target + tile::mma_columns * j) = {s[j][2 * half] * unit,
                                                                               s[j][2 * half + 1] * unit};
        }
    }
}

}   // namespace op

// The entry of a format.
#define MEAN_SCORES(name, Format, dim)                                                                                 \
    KERNEL(name, .threads = {op::mean_score_threads},                                                                  \
           .shared_bytes = sizeof(op::DecodedKeys<tile::KeyTile<Format, tile::tile_keys, dim>>), .tile = {1, 1, 1})    \
    (const float *mean,      /* [batch, heads_kv, group, blocks, cols] */                                              \
     const uint8_t *k_tiles, /* [batch, heads_kv, tiles, k_bytes]: tile::KeyTile */                                    \
     const float *q_global,  /* [1] or null */                                                                         \
     float *scores,          /* [batch, heads_kv, tiles, blocks, group, 64] */                                         \
     int batch, int heads_kv, int group, int blocks, int cols, int tiles, int k_bytes) {                               \
        using Tile = tile::KeyTile<Format, tile::tile_keys, dim>;                                                      \
        op::mean_scores(shared<op::DecodedKeys<Tile>>(), mean, reinterpret_cast<const Tile *>(k_tiles), q_global,      \
                        scores, group, blocks, cols);                                                                  \
    }
