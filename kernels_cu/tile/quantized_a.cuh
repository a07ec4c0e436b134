// Rows of a matrix quantized to MXFP4 in registers, as A, and tiles of keys and values quantized from rows.
#pragma once

#include <cstdint>

#include "../ptx/warp.cuh"
#include "block_tiles.cuh"
#include "packing.cuh"
#include "rows.cuh"
#include "scale.cuh"

namespace tile {

// One row of A of this lane, g or g + 8 by `half`: its codes at every step, and its scales in words of four. Each of
// the four lanes of a row has eight values of each block, and all scales. The bytes are those of quantize_mxfp4.
template <bool rolled, int steps, int words, class Element>
__device__ inline void quantize_a(FragmentA (&codes)[steps], uint32_t (&scales)[words], int half,
                                  const Rows<Element> &row) {
    const int thread = ptx::laneid() % 4;
#pragma unroll
    for (uint32_t &word : scales) word = 0;
#pragma unroll(rolled ? 1 : steps)
    for (int step = 0; step < steps; ++step)
#pragma unroll
        for (int chunk = 0; chunk < 2; ++chunk) {
            const int block = 2 * step + chunk;
            Eight<Element> eight[1];
            row.load(eight, 0, 0, mx_block * block + 8 * thread);
            float values[8];
            eight[0].unpack(values);
            const uint32_t scale = mx_scale<E2m1>(Blocks<mx_block, 8>::amax(amax_of(values)), ScaleRule::floor);
            codes[step][2 * chunk + half] = scale == ue8m0_nan ? 0 : encode_scaled<E2m1>(values, scale).word[0];
            scales[block / 4] |= scale << (8 * (block % 4));
        }
}

// Arranges the scales of the rows g and g + 8 of a lane as load_scales_a does: those of the row scale_row(),
// `register_words` words to a register.
template <int register_words, int registers, int words>
__device__ inline void place_scales_a(uint32_t (&placed)[registers], const uint32_t (&scales)[2][words]) {
    const int word_of_lane = ptx::laneid() % 4 / 2 % register_words;
#pragma unroll
    for (int i = 0; i < registers; ++i) {
        uint32_t low = 0, high = 0;   // of the rows g and g + 8
#pragma unroll
        for (int word = 0; word < register_words; ++word)
            if (word == word_of_lane && register_words * i + word < words)
                low = scales[0][register_words * i + word], high = scales[1][register_words * i + word];
        placed[i] = scale_half() ? high : low;
    }
}

// The rows of a matrix from `key` on.
template <class Element>
__device__ inline Rows<Element> rows_from(const Rows<Element> &rows, int key) {
    return {rows.at(key, 0), rows.stride, rows.rows - key, rows.cols};
}

// Quantizes a tile of keys to MXFP4, as pack_keys_mxfp4 does, by `threads` threads. The caller needs a barrier behind
// it.
template <int threads, int dim, class Element>
__device__ inline void quantize_keys(KeyTile<Mxfp4, tile_keys, dim> &tile, const Rows<Element> &rows) {
    using Tile = KeyTile<Mxfp4, tile_keys, dim>;
    using Packing = KeyPacking<Tile, rows_at_once(threads, dim / 16, tile_keys)>;
    using Blocks = typename Packing::Blocks;
    constexpr int batch = Packing::items < 2 ? Packing::items : 2;   // of a thread, in flight
    if (threadIdx.x >= Packing::threads) return;
#pragma unroll
    for (int first = 0; first < Packing::items; first += batch) {
        Eight<Element> eights[Blocks::groups][batch];
#pragma unroll
        for (int group = 0; group < Blocks::groups; ++group)
            rows.load(eights[group], Packing::row() + first * Packing::step, Packing::step,
                      Packing::column() + 8 * group);
#pragma unroll
        for (int i = 0; i < batch; ++i) {
            float values[Blocks::groups][8], amax = 0.0f;
#pragma unroll
            for (int group = 0; group < Blocks::groups; ++group) {
                eights[group][i].unpack(values[group]);
                amax = ptx::max_nan_f32(amax, amax_of(values[group]));
            }
            const uint32_t scale = mx_scale<E2m1>(Blocks::amax(amax), ScaleRule::floor);
            Codes<4> codes[Blocks::groups];
#pragma unroll
            for (int group = 0; group < Blocks::groups; ++group) {
                codes[group] = encode_scaled<E2m1>(values[group], scale);
                if (scale == ue8m0_nan) codes[group].word[0] = 0;
            }
            Packing::put(tile, first + i, codes, scale);
        }
    }
}

// Rounds a tile of values to bf16, to nearest, ties to even, by `threads` threads. The caller needs a barrier behind
// it.
template <int threads, int dim_v, class Element>
__device__ inline void round_values(ValueTile<Bf16, tile_keys, dim_v> &tile, const Rows<Element> &rows) {
    using Packing = RowPacking<tile_keys, dim_v, 8, rows_at_once(threads, dim_v / 8, tile_keys)>;
    constexpr int batch = Packing::items < 4 ? Packing::items : 4;   // of a thread, in flight
    if (threadIdx.x >= Packing::threads) return;
#pragma unroll
    for (int first = 0; first < Packing::items; first += batch) {
        Eight<Element> eights[batch];
        rows.load(eights, Packing::row() + first * Packing::step, Packing::step, Packing::column());
#pragma unroll
        for (int i = 0; i < batch; ++i) {
            float values[8];
            eights[i].unpack(values);
            tile.at(Packing::row() + (first + i) * Packing::step, Packing::column() / 8) =
                pack(values, Bf16::Element{});
        }
    }
}

}   // namespace tile
