// Attention that quantizes Q and K to MXFP4 as it loads them and multiplies P and V in bf16. It is attention on block
// formats (attention_blocks.cuh) with operands and a pipeline that compute tiles from rows. A block quantizes the keys
// once for all of its rows.
#pragma once

#include <cstdint>

#include "../kernel.cuh"
#include "../ptx/barrier.cuh"
#include "../tile/block_tiles.cuh"
#include "../tile/fragment.cuh"
#include "../tile/quantized_a.cuh"
#include "../tile/rows.cuh"
#include "attention_blocks.cuh"
#include "problem.cuh"

namespace op {

// The stages of a block that computes each tile of K and V itself, with the members of tile::Pipeline.
//
// All threads fill a stage, then arrive at a barrier. After it the tile is complete, and all threads have read the tile
// before. With two or more stages, warps that finish a tile early fill the next stage while others still multiply.
template <class Tiling, class Element, bool with_values>
struct QuantizingPipeline {
    typename Tiling::Shared &shared;
    tile::Rows<Element> k, v;   // of the sequence
    bool again;

    // Called by the whole block.
    __device__ void start() {
        if (again) ptx::bar_sync();   // all threads have read the output, which was staged over the tiles
    }

    // Fills the stage of a tile and returns it. Called by all warps, for every tile in order.
    template <bool>
    __device__ typename Tiling::Stage take(int index) {
        const typename Tiling::Stage stage = shared.tiles.at(index);
        tile::quantize_keys<Tiling::threads>(stage.k(), tile::rows_from(k, index * tile::tile_keys));
        if constexpr (with_values)
            tile::round_values<Tiling::threads>(stage.v(), tile::rows_from(v, index * tile::tile_keys));
        ptx::bar_sync();   // the tile is whole; everyone is done with the one before
        return stage;
    }

    // As in tile::Pipeline, but from values in memory, rounded to bf16.
    __device__ uint32_t value_pair(int key, int j) const {
        const int column = j * tile::mma_columns + tile::accumulator_column(0);
        const auto value = [&](int i) { return v.holds(key, column + i) ? float(*v.at(key, column + i)) : 0.0f; };
        return tile::rounded_pair(value(1), value(0), tile::Bf16::Element{});
    }

    __device__ void release(int) {}
    __device__ void release_keys(int) {}

    // Queries are not smoothed.
    __device__ static bool stages_means() { return false; }
    __device__ static const float *means_of(int) { return nullptr; }
};

// Q, K and V in their arrays, with the members of BlockOperands. If with_values is false, only scores are computed, and
// v is null.
template <class Element, bool with_values = true>
struct InKernelOperands {
    const Element *q;   // [batch, heads_kv, group, queries, dim]
    const Element *k;   // [batch, heads_kv, keys, dim]
    const Element *v;   // [batch, heads_kv, keys, dim_v]
    StridesQ q_strides;
    StridesK k_strides, v_strides;

    // There are no global scales, and queries are not smoothed.
    static constexpr const float *mean_scores = nullptr;
    static constexpr int query_blocks = 0, tiles = 0;
    __device__ static float score_level() { return 1.0f; }
    __device__ static float value_level() { return 1.0f; }

    // Loads and quantizes the rows of Q from `warp_row` on; missing rows and columns are zeros.
    template <class Queries>
    __device__ void load(Queries &target, const Problem &problem, int warp_row) const {
#pragma unroll
        for (int slice = 0; slice < Queries::slices; ++slice) {
            uint32_t scales[2][Queries::words];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = warp_row + 16 * slice + tile::accumulator_row(2 * half);
                const Element *source = q + problem.at(q_strides, min(row, problem.rows - 1));
                tile::quantize_a<Queries::rolled>(
                    target.codes[slice], scales[half], half,
                    tile::Rows<Element>(source, 0, row < problem.rows, problem.options.dim));
            }
            tile::place_scales_a<Queries::register_words>(target.scales[slice], scales);
        }
    }

    template <class Tiling>
    __device__ QuantizingPipeline<Tiling, Element, with_values> pipeline(typename Tiling::Shared &shared,
                                                                         const Problem &problem,
                                                                         const TileRange<tile::tile_keys> &, bool again,
                                                                         const BlockMeans & = {}) const {
        const AttentionOptions &options = problem.options;
        return {shared,
                {k + problem.at(k_strides), k_strides.key, problem.keys, options.dim},
                {v + (with_values ? problem.at(v_strides) : 0), v_strides.key, problem.keys, options.dim_v},
                again};
    }
};

// scores[batch, heads_kv, group, queries, keys] = Q K^T of the tiles of attention, before scale and mask, for the rows
// of a block.
template <class Tiling, class Operands>
__device__ inline void probe_scores(typename Tiling::Shared &shared, const Operands &operands,
                                    const AttentionOptions &options, float *scores) {
    using Order = tile::NaturalKeys;
    const Problem problem(options, blockIdx);
    const int first_row = problem.row_block * Tiling::rows,
              warp_row = first_row + threadIdx.x / 32 * 16 * Tiling::slices;
    const TileRange<tile::tile_keys> range(problem, first_row, min(first_row + Tiling::rows, problem.rows));
    auto pipeline = operands.template pipeline<Tiling>(shared, problem, range, false);
    pipeline.start();
    typename Tiling::Tiles tiles;
    tiles.start(shared, operands, problem, warp_row);
    for (int index = range.begin; index < range.end; ++index) {
        const auto stage = pipeline.template take<false>(index);
        tiles.template prepare<Order>(shared, stage, pipeline, index);
        tile::Accumulator s[Tiling::slices][tile::tile_keys / tile::mma_columns];
        tiles.template multiply<Order>(s, shared, stage);
        const int lane_key = index * tile::tile_keys + Order::key(0, tile::accumulator_column(0));
        for_scores<Order>(s, [&](float &score, int slice, int half, int key) {
            const int row = warp_row + 16 * slice + tile::accumulator_row(2 * half);
            if (row < problem.rows && lane_key + key < problem.keys)
                scores[problem.row_at(row) * problem.keys + lane_key + key] = score;
        });
        tiles.release(pipeline, index);
    }
}

}   // namespace op
