// Attention on block formats with block-scaled MMAs: Q is in registers, tiles of K and V are multiplied from their
// stage.
#pragma once

#include <cstdint>

#include "../kernel.cuh"
#include "../tile/block_tiles.cuh"
#include "../tile/fragment.cuh"
#include "../tile/pipeline.cuh"
#include "problem.cuh"

namespace op {

// Q of a warp's slices: operand A at each step and its scales, two words of a row to a register, or one where loops are
// `rolled`.
template <class Format, int slices_, int dim, bool rolled_>
struct BlockQueries {
    static constexpr bool rolled = rolled_;
    static constexpr int slices = slices_, steps = dim / Format::depth, words = ceil_div(steps, Format::steps_per_word);
    static constexpr int register_words = rolled ? 1 : 2;
    tile::FragmentA codes[slices][steps];
    uint32_t scales[slices][ceil_div(words, register_words)];
};

// Scores of the means of queries with K, for the rows of a block: for each tile [count, 64], a vector of the tile's
// keys for each mean. Those of the sequence's tile 0 begin at `first`, those of each further tile `tile_step` floats
// behind.
struct BlockMeans {
    const float *first = nullptr;
    int tile_step = 0;
    int count = 0;
    int first_block = 0;   // of the first row, among its sequence's blocks of queries that share a mean

    BlockMeans() = default;

    template <class Operands>
    __device__ BlockMeans(const Operands &operands, const Problem &problem, int first_row, int end_row) {
        if (!operands.mean_scores) return;
        const int group = problem.options.group, head = problem.batch * problem.options.heads_kv + problem.head;
        first_block = problem.query_of(first_row) / smooth_queries;
        count = (problem.query_of(end_row - 1) / smooth_queries - first_block + 1) * group;
        tile_step = operands.query_blocks * group * tile::tile_keys;
        first = operands.mean_scores +
                (int64_t(head) * operands.tiles + problem.first_tile(tile::tile_keys)) * tile_step +
                (problem.first_block() + first_block) * group * tile::tile_keys;
    }

    // The index of a row's vector among the block's vectors.
    __device__ int of_row(const Problem &problem, int row) const {
        return (problem.query_of(row) / smooth_queries - first_block) * problem.options.group + problem.group_of(row);
    }
};

// Q, K and V of attention on block formats, all quantized in advance. Attention that quantizes as it loads has operands
// with the same members (quantized_blocks.cuh).
struct BlockOperands {
    const uint8_t *q_codes;                        // [batch, heads_kv, group, queries, q_bytes]
    const uint8_t *q_scales;                       // [batch, heads_kv, group, queries, q_blocks]
    const uint8_t *k_tiles;                        // [batch, heads_kv, tiles]: tile::KeyTile
    const uint8_t *v_tiles;                        // [batch, heads_kv, tiles]: tile::ValueTile
    const float *q_global, *k_global, *v_global;   // [1] or null: the global scales of NVFP4
    const float *mean_scores;   // [batch, heads_kv, tiles, query_blocks, group, tile_keys] or null: the scores that
                                // smoothing took from Q, in the units of a product of codes and scales
    int q_bytes, q_blocks, tiles, query_blocks;   // of a row of Q; of a head of K and V, and of Q
    StridesQ q_codes_strides, q_scales_strides;

    // The factors of scores and of values.
    __device__ float score_level() const { return (q_global ? *q_global : 1.0f) * (k_global ? *k_global : 1.0f); }
    __device__ float value_level() const { return v_global ? *v_global : 1.0f; }

    // Loads the rows of Q from `warp_row` on; missing rows and columns are zeros.
    template <class Queries>
    __device__ void load(Queries &q, const Problem &problem, int warp_row) const {
#pragma unroll
        for (int slice = 0; slice < Queries::slices; ++slice) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = warp_row + 16 * slice + tile::accumulator_row(2 * half);
                const uint8_t *source = q_codes + problem.at(q_codes_strides, min(row, problem.rows - 1));
                tile::load_codes_a<Queries::rolled>(q.codes[slice], half, source, row < problem.rows ? q_bytes : 0);
            }
            const int row = min(warp_row + 16 * slice + tile::scale_row(), problem.rows - 1);
            tile::load_scales_a<Queries::rolled, Queries::register_words>(
                q.scales[slice], q_scales + problem.at(q_scales_strides, row), q_blocks);
        }
    }

    // The pipeline of tiles of K and V through the stages of a block, for the first pass or `again`: then the phases of
    // the barriers continue from the first pass.
    template <class Tiling>
    __device__ tile::Pipeline<Tiling> pipeline(typename Tiling::Shared &shared, const Problem &problem,
                                               const TileRange<tile::tile_keys> &range, bool again,
                                               const BlockMeans &means = {}) const {
        const size_t first_tile = size_t(problem.batch * problem.options.heads_kv + problem.head) * tiles +
                                  problem.first_tile(tile::tile_keys);
        return {shared,
                reinterpret_cast<const typename Tiling::Keys *>(k_tiles) + first_tile,
                reinterpret_cast<const typename Tiling::Values *>(v_tiles) + first_tile,
                range.begin,
                range.end,
                again ? 2 * range.begin - range.end : range.begin,
                means.first,
                means.tile_step,
                means.count};
    }
};

// The scores of the means of queries, for the rows of a warp.
template <class Order, int slices>
struct MeanScores {
    const BlockMeans &means;
    int place[slices][2] = {};   // of this lane's first score, among the floats of the block's vectors

    template <class Operands>
    __device__ MeanScores(const BlockMeans &means, const Operands &operands, const Problem &problem, int warp_row)
        : means(means) {
        if (!operands.mean_scores) return;
        tile::for_rows<slices>([&](int slice, int half) {
            const int row = min(warp_row + 16 * slice + tile::accumulator_row(2 * half), problem.rows - 1);
            place[slice][half] =
                means.of_row(problem, row) * tile::tile_keys + Order::key(0, tile::accumulator_column(0));
        });
    }

    // Adds the scores of tile `index`, from its stage if they are staged (`staged`: always), else from global memory.
    template <bool staged, int tiles, class Pipeline>
    __device__ void add(tile::Accumulator (&s)[slices][tiles], const Pipeline &pipeline, int index) const {
        if (staged || pipeline.stages_means()) {
            const float *vectors = pipeline.means_of(index);
            add(s, [&](int at) { return *reinterpret_cast<const float2 *>(vectors + at); });
        } else {
            const float *vectors = means.first + int64_t(index) * means.tile_step;
            add(s, [&](int at) { return __ldg(reinterpret_cast<const float2 *>(vectors + at)); });
        }
    }

    template <int tiles, class Load>
    __device__ void add(tile::Accumulator (&s)[slices][tiles], Load &&load) const {
        tile::for_rows<slices>([&](int slice, int half) {
#pragma unroll
            for (int j = 0; j < tiles; ++j) {
                const float2 pair = load(place[slice][half] + Order::key(j, 0));
                s[slice][j][2 * half] += pair.x;
                s[slice][j][2 * half + 1] += pair.y;
            }
        });
    }
};

// s = Q K^T for all keys of a tile, columns in `Order`.
template <class Order, class Format, int slices, int dim, bool rolled, int tiles, class Tile>
__device__ inline void multiply_block_scores(tile::Accumulator (&s)[slices][tiles],
                                             const BlockQueries<Format, slices, dim, rolled> &q, const Tile &k) {
#pragma unroll
    for (auto &slice : s)
#pragma unroll
        for (auto &accumulator : slice)
#pragma unroll
            for (float &element : accumulator) element = 0.0f;
    const uint32_t lane_address = k.template lane_address<Order>();
    // If rolled: one copy of the MMAs for all steps. Run-time indices put Q in local memory.
#pragma unroll 1
    for (int step = 0; rolled && step < Tile::steps; ++step) {
        const int word = step / Format::steps_per_word,
                  byte = step % Format::steps_per_word * (4 / Format::steps_per_word);
        static_for<tiles / 2>([&](auto pair) {
            const uint32_t k_scales = k.template scales_b<Order>(pair / 2)[word] >> (8 * byte);
            tile::FragmentB b[2];
            Tile::template load_b<Order, pair>(b, lane_address, step);
            static_for<2>([&](auto half) {
                static_for<slices>([&](auto slice) {
                    tile::multiply<0, 0, 0, 2 * (pair % 2) + half>(
                        s[slice][2 * pair + half], Format{}, q.codes[slice][step], q.scales[slice][word] >> (8 * byte),
                        b[half], k_scales);
                });
            });
        });
    }
    // Otherwise: four column tiles at a time, whose scales share one register.
    static_for<rolled ? 0 : tiles / 4>([&](auto group) {
        const auto &k_scales = k.template scales_b<Order>(group);
        static_for<Tile::steps>([&](auto step) {
            constexpr int word = step / Format::steps_per_word,
                          byte = step % Format::steps_per_word * (4 / Format::steps_per_word);
            static_for<2>([&](auto pair) {
                tile::FragmentB b[2];
                Tile::template load_b<Order, 2 * group + pair>(b, lane_address, step);
                static_for<2>([&](auto half) {
                    static_for<slices>([&](auto slice) {
                        tile::multiply<byte, word % 2, byte, 2 * pair + half>(
                            s[slice][4 * group + 2 * pair + half], Format{}, q.codes[slice][step],
                            q.scales[slice][word / 2], b[half], k_scales[word]);
                    });
                });
            });
        });
    });
}

// The warps of a block multiply tiles from their stage.
template <class Tiling>
struct StagedTiles {
    struct Shared {};   // nothing besides the stages

    BlockQueries<typename Tiling::ScoreFormat, Tiling::slices, Tiling::dim, Tiling::rolled> q;

    // Loads Q.
    template <class AllShared, class Operands>
    __device__ void start(AllShared &, const Operands &operands, const Problem &problem, int warp_row) {
        operands.load(q, problem, warp_row);
    }

    // Preparation of a tile by the whole block: none.
    template <class Order, class AllShared, class Pipeline>
    __device__ void prepare(AllShared &, const typename Tiling::Stage &, Pipeline &, int) {}

    // s = Q K^T.
    template <class Order, class AllShared, class Scores>
    __device__ void multiply(Scores &s, AllShared &, const typename Tiling::Stage &stage) {
        multiply_block_scores<Order>(s, q, stage.k());
    }

    // The softmax, and o += P V.
    template <bool masked, bool sums, class Softmax, class AllShared, class Scores>
    __device__ __forceinline__ void add(Softmax &softmax, Scores &s, AllShared &, const typename Tiling::Stage &stage,
                                        float factor) {
        softmax.template add<masked, sums>(s, stage.v(), factor);
    }

    // Releases the tile for this warp.
    template <class Pipeline>
    __device__ void release(Pipeline &pipeline, int index) {
        pipeline.release(index);
    }
};

}   // namespace op
