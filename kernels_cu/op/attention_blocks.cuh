// Fused attention on operands in block formats: block-scaled MMAs for S = Q K^T and O = P V, with P quantized in
// registers; or V in 16 bits, and P rounded to it.
//
// K and V are tiles; one bulk copy loads each to shared memory (tile/block_tiles.cuh). The order of the keys as columns
// of S makes P an operand in the registers in which it is computed. WeightedValues computes P and multiplies it by V,
// for each format of V (weights.cuh). StagedTiles or ExpandedTiles multiplies tiles.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../kernel.cuh"
#include "../ptx/alu.cuh"
#include "../ptx/barrier.cuh"
#include "../tile/attention_shape.cuh"
#include "../tile/block_tiles.cuh"
#include "../tile/fragment.cuh"
#include "../tile/pipeline.cuh"
#include "attention.cuh"
#include "expanded_blocks.cuh"
#include "problem.cuh"
#include "staged_blocks.cuh"
#include "weights.cuh"

namespace op {

// How a block divides the work, and the stages that K and V go through. smooths: whether queries may be smoothed. half:
// whether it is a half block.
template <class ScoreFormat_, class ValueFormat_, int dim_, int dim_v_, bool smooths = true, bool half = false>
struct BlockTiling : tile::BlockAttentionShape<ScoreFormat_, ValueFormat_, dim_, dim_v_, half> {
    using Shape = tile::BlockAttentionShape<ScoreFormat_, ValueFormat_, dim_, dim_v_, half>;
    using ScoreFormat = ScoreFormat_;
    using ValueFormat = ValueFormat_;
    static constexpr int dim = dim_, dim_v = dim_v_;
    static constexpr bool is_half = half;
    static constexpr bool hurries = false;   // see Problem
    static constexpr bool ends_quickly = false;
    static constexpr bool walks_rows = false;   // see store_rows
    static constexpr int threads = 32 * Shape::warps;
    static constexpr int rows = 16 * Shape::slices * Shape::warps;
    static constexpr bool runs_again = ValueFormat::bits == 16;   // over the same tiles, if sums were too small
    // Spills cost less than fewer warps.
    static constexpr int spill_bytes = Shape::crowded ? 2240 : ValueFormat::bits == 16 ? 192 : 320;

    using Keys = tile::KeyTile<ScoreFormat, tile::tile_keys, dim>;
    using Values = tile::ValueTile<ValueFormat, tile::tile_keys, dim_v>;
    static constexpr int budget = 99 * 1024 / Shape::blocks - 1024;
    static constexpr int stage_bytes = sizeof(Keys) + sizeof(Values), whole_stages = budget / stage_bytes;
    // K of a tile is released before its V. So a third stage may serve V alone.
    static constexpr bool keys_leave_early =
        Shape::has_plain_loop && whole_stages == 2 && budget >= 3 * stage_bytes - int(sizeof(Keys));
    static constexpr int stages = Shape::expands ? 2 : keys_leave_early ? 3 : whole_stages < 4 ? whole_stages : 4;
    static constexpr int key_stages = stages - keys_leave_early;
    static_assert(key_stages >= 2, "one stage is filled while another is read");
    using Stages = tile::Stages<Keys, Values, key_stages, stages>;
    using Stage = typename Stages::Place;

    // The most mean vectors that a stage holds, [mean_vectors, 64]: the scores of the means of smoothed queries with
    // the keys of the tile. 16 vectors serve 16 heads that share K, or 8 heads if a block's rows have two means of
    // each. Smoothed tiles without masks then have a loop of their own, except with V in 16 bits, whose MMAs take
    // longest.
    static constexpr int output_bytes = rows * dim_v * sizeof(__nv_bfloat16),
                         staged_bytes = int(sizeof(Stages)) > output_bytes ? sizeof(Stages) : output_bytes,
                         vectors_left = (budget - staged_bytes - 16 * stages) / (stages * tile::tile_keys * 4);
    static constexpr int mean_vectors = !smooths || !Shape::has_plain_loop || vectors_left < 4 ? 0
                                        : vectors_left < 16                                    ? vectors_left
                                                                                               : 16;
    static constexpr bool has_smooth_loop = mean_vectors > 0 && ValueFormat::bits < 16;

    // Warps without rows have a loop of their own, so that the others do not test for it in each tile. Narrow heads in
    // 8 bits, and warps with few registers unless P is in NVFP4, are slower with it in the static model.
    static constexpr bool has_idle_loop =
        Shape::has_plain_loop && ValueFormat::bits < 16 &&
        (Shape::crowded ? std::is_same_v<ValueFormat, tile::Nvfp4> : ScoreFormat::bits == 4 || Shape::widest > 96);

    // The number of a warp of the block. With few registers a uniform one is better, where the idle loop is.
    __device__ static int warp() {
        const int number = threadIdx.x / 32;
        if constexpr (Shape::crowded && has_idle_loop) return ptx::shfl_sync_idx_b32(number, 0);
        else return number;
    }

    // Products P V of a plain tile wait until P of the next tile is computed, and overlap its exponentials, which needs
    // a third stage. They are counted in pairs of column tiles. All wait if Q and K have 4 bits. Q and K in 8 bits
    // leave fewer registers for P, and their MMAs take longer: the last quarter waits, except in heads of 32, which
    // gain nothing. Sixteen warps at 128 columns leave too few registers, as does wide V in 8 bits where the stages
    // hold twelve warps or K of 4 bits.
    static constexpr bool overlaps =
        Shape::has_plain_loop && !Shape::crowded && stages > 2 &&
        (ValueFormat::bits == 4 || (ValueFormat::bits == 8 && (Shape::widest <= 128 || keys_leave_early) &&
                                    (ScoreFormat::bits == 4 || Shape::widest > 32)));
    // So do smoothed tiles where K leaves early: their other loop loses 3 % in the static model.
    static constexpr bool overlaps_smooth = overlaps && keys_leave_early;
    // Tiles whose exact P are summed have a loop of their own, which overlaps as that of plain tiles does: with V in 4
    // bits, and with V in 8 bits at 64 columns, where half blocks would lose 20 to 40 % without it. K in 8 bits leaves
    // whole blocks no registers for it. Wider heads gain nothing.
    static constexpr bool has_sum_loop =
        Shape::has_plain_loop && (overlaps || Shape::crowded) &&
        (ValueFormat::bits == 4 ? Shape::widest <= 128
                                : ValueFormat::bits == 8 && Shape::widest <= 64 && (half || ScoreFormat::bits == 4));
    // Where sums have a loop, one test precedes all loops of plain tiles, and with V in 4 bits a tile is released
    // within the branch that reads it last: 5 % each in the static model. Half blocks in MXFP4 at 128 columns release
    // plain tiles behind the branch: 9 %.
    static constexpr bool releases_in_branch(bool sums) {
        return has_sum_loop && ValueFormat::bits == 4 &&
               (sums || !half || Shape::widest < 128 || std::is_same_v<ValueFormat, tile::Nvfp4>);
    }
    // The order of the tests for sums moves both loops: the sums of MXFP4 at 128 columns and of MXFP8 gain 4 % by it.
    // NVFP4 would lose.
    static constexpr bool tests_sums_last = !std::is_same_v<ValueFormat, tile::Nvfp4>;
    static constexpr int pairs_waiting(int pairs) { return ScoreFormat::bits == 4 ? pairs : pairs / 4; }

    template <class Output>
    using OutputTile = tile::SharedTile<rows, dim_v * sizeof(Output)>;
    using Tiles = std::conditional_t<Shape::expands, ExpandedTiles<BlockTiling>, StagedTiles<BlockTiling>>;
    struct Nothing {};
    struct KeyBarriers {
        uint64_t keys_empty[key_stages];
    };
    struct StagedMeans {
        alignas(16) float of_stage[stages][mean_vectors * tile::tile_keys];
    };
    struct Shared : Tiles::Shared, std::conditional_t<keys_leave_early, KeyBarriers, Nothing> {
        union {
            Stages tiles;
            OutputTile<__nv_bfloat16> q;   // when all tiles were read, the output is staged here
        };
        alignas(16) uint64_t full[stages], empty[stages];
        [[no_unique_address]] std::conditional_t<(mean_vectors > 0), StagedMeans, Nothing> means;
    };
    static_assert(sizeof(Shared) <= 99 * 1024 - 1024, "the tiles fit everywhere");
};

// All plain tiles from `index` on, of which there is at least one. A part of the products P V of each waits until P of
// the next tile is computed. If `sums`, exact P are added to row_sum. If `smooth`, the scores of means in the stages
// are added to the scores.
template <class Tiling, bool sums, bool smooth, class Pipeline, class Softmax, class Means, class Plain>
__device__ __forceinline__ void overlap_plain_tiles(typename Tiling::Shared &shared, Pipeline &pipeline,
                                                    typename Tiling::Tiles &tiles, Softmax &softmax, const Means &means,
                                                    float factor, int &index, const Plain &plain) {
    constexpr int columns = tile::tile_keys / tile::mma_columns;
    using Order = typename Softmax::Order;
    using Values = typename Tiling::Values;
    constexpr int pairs = Softmax::template pairs_of<Values>, at_once = pairs - Tiling::pairs_waiting(pairs);
    ProbabilityFragments<typename Tiling::ValueFormat, columns> p[Tiling::slices];
    typename Tiling::Stage before = pipeline.template take<smooth>(index);
    {
        tile::Accumulator s[Tiling::slices][columns];
        tiles.template multiply<Order>(s, shared, before);
        pipeline.release_keys(index);
        if constexpr (smooth) means.template add<true>(s, pipeline, index);
        softmax.template take<false, sums>(p, s, factor);
        softmax.template accumulate_pairs<0, at_once>(p, before.v());
    }
    for (++index; plain(index); ++index) {
        const auto stage = pipeline.template take<smooth>(index);
        tile::Accumulator s[Tiling::slices][columns];
        tiles.template multiply<Order>(s, shared, stage);
        pipeline.release_keys(index);
        if constexpr (smooth) means.template add<true>(s, pipeline, index);
        ProbabilityFragments<typename Tiling::ValueFormat, columns> made[Tiling::slices];
        const auto finish = [&] {
            softmax.template accumulate_pairs<at_once, pairs>(p, before.v());
            if (Tiling::releases_in_branch(sums)) pipeline.release(index - 1);
        };
        softmax.template take_after<sums>(made, s, factor, finish,
                                          [&] { softmax.template accumulate_pairs<0, at_once>(made, stage.v()); });
        if (!Tiling::releases_in_branch(sums)) pipeline.release(index - 1);
        before = stage;
#pragma unroll
        for (int slice = 0; slice < Tiling::slices; ++slice) p[slice] = made[slice];
    }
    softmax.template accumulate_pairs<at_once, pairs>(p, before.v());
    pipeline.release(index - 1);
}

// O = softmax(scale Q K^T) V for Tiling::rows rows of one head of K and V (and one split of its keys). Operands is
// BlockOperands or a type with the same members. Returns whether any sums were too small: then the block calls this
// once more with `again`.
template <class Tiling, class Softmax, class Operands>
__device__ __forceinline__ bool attend_rows_of_blocks(typename Tiling::Shared &shared, const Operands &operands,
                                                      const AttentionOptions &options, bool again, float *exact_sum) {
    using Order = typename Softmax::Order;

    // Which rows, and which tiles of keys they see.
    const Problem problem(options,
                          Softmax::lowered ? ptx::block() : uint3(blockIdx));   // of this pass: see ptx::block()
    const int first_row = problem.row_block * Tiling::rows;
    if (first_row >= problem.rows) return false;   // packed sequences have different lengths
    const int end_row = min(first_row + Tiling::rows, problem.rows);
    const int warp_row = first_row + Tiling::warp() * 16 * Tiling::slices;
    // Global scales delay the first copies if they are loaded before. Half blocks have few tiles and load them with Q;
    // whole blocks have no registers left for that.
    float scale;
    const auto load_scale = [&] {
        const float level = operands.score_level();
        scale = options.scale * (level == INFINITY ? -no_maximum : level);   // scores of 0 stay 0
    };
    if constexpr (!Tiling::is_half) load_scale();
    TileRange<tile::tile_keys> range(problem, first_row, end_row);
    if (again) range.plain_end = range.plain_begin;
    const bool smoothed = operands.mean_scores;
    const BlockMeans means(operands, problem, first_row, end_row);

    // Start copying the first tiles, and load Q.
    auto pipeline = operands.template pipeline<Tiling>(shared, problem, range, again, means);
    pipeline.start();
    typename Tiling::Tiles tiles;
    tiles.start(shared, operands, problem, warp_row);
    Softmax softmax;
    softmax.start(options.partial != nullptr);
    if constexpr (Softmax::lowered) softmax.again = again;
    if constexpr (Tiling::is_half) load_scale();
    const float factor = score_factor(problem, scale);
    const bool idle = warp_row >= problem.rows;
    const MeanScores<Order, Tiling::slices> mean_scores(means, operands, problem, warp_row);
    const int warp_end = problem.end_visible(problem.query_of(min(warp_row + 16 * Tiling::slices, problem.rows) - 1));

    // Adds the scores of the means of queries to those of a tile. Where one loop serves all tiles, the means are found
    // anew for each tile: in registers they would make the loop spill, of calls that smooth nothing, too.
    const auto add_means = [&](auto &s, auto smooth, int index) __attribute__((always_inline)) {
        if constexpr (Tiling::has_plain_loop) {
            mean_scores.template add<std::is_same_v<decltype(smooth), std::true_type>>(s, pipeline, index);
        } else {
            const int row = ptx::mov_b32(warp_row), first = row - (warp_row - first_row);
            const BlockMeans found(operands, problem, first, min(first + Tiling::rows, problem.rows));
            MeanScores<Order, Tiling::slices>(found, operands, problem, row).template add<false>(s, pipeline, index);
        }
    };

    // A tile: scores, masks, softmax, and the weighted values.
    auto step = [&](int index, auto masked, auto sums,
                    auto smooth) __attribute__((always_inline)) {   // its arrays stay in registers
        constexpr bool maybe_smooth = !std::is_same_v<decltype(smooth), std::false_type>;
        const auto stage = pipeline.template take < maybe_smooth && (Tiling::mean_vectors > 0) > (index);
        tiles.template prepare<Order>(shared, stage, pipeline, index);
        // A warp without rows, or whose rows see no key of this tile, only releases the stage.
        if ((Tiling::has_idle_loop || !idle) && !(masked && index * tile::tile_keys >= warp_end)) {
            tile::Accumulator s[Tiling::slices][tile::tile_keys / tile::mma_columns];
            tiles.template multiply<Order>(s, shared, stage);
            if (smooth) add_means(s, smooth, index);
            if (masked) mask_scores<Order>(s, problem, warp_row, index * tile::tile_keys, scale);
            constexpr bool maybe_masked = !std::is_same_v<decltype(masked), std::false_type>;
            tiles.template add<maybe_masked, sums>(softmax, s, shared, stage, factor);
        }
        pipeline.release_keys(index);
        tiles.release(pipeline, index);
    };

    // All tiles. Those without masks have loops of their own if the tiling has them: with the scores of means, with
    // sums of exact P, and without both.
    const auto plain = [&](int index) { return range.plain_begin <= index && index < range.plain_end; };
    int index = range.begin;
    const auto plain_tiles = [&](auto sums, auto smooth) __attribute__((always_inline)) {
        if constexpr (!Tiling::overlaps || (smooth && !Tiling::overlaps_smooth)) {
            for (; plain(index); ++index) step(index, std::false_type{}, sums, smooth);
        } else if (Tiling::has_sum_loop || plain(index)) {
            overlap_plain_tiles<Tiling, sums, smooth>(shared, pipeline, tiles, softmax, mean_scores, factor, index,
                                                      plain);
        }
    };
    // A warp without rows.
    if (Tiling::has_idle_loop && idle)
        for (; index < range.end; ++index) {
            pipeline.template take<false>(index);
            pipeline.release_keys(index);
            pipeline.release(index);
        }
    for (; index < range.end; ++index) {
        const auto is_summed = [&] { return Softmax::sums_apart && (options.lse || exact_sum); };
        if constexpr (Tiling::has_sum_loop) {
            if (plain(index)) {
                const bool summed = is_summed();
                if constexpr (Tiling::has_smooth_loop)
                    if (pipeline.stages_means() && !summed) plain_tiles(std::false_type{}, std::true_type{});
                if constexpr (Tiling::tests_sums_last) {
                    if (!smoothed && !summed) plain_tiles(std::false_type{}, std::false_type{});
                    else if (!smoothed) plain_tiles(std::true_type{}, std::false_type{});
                } else {
                    if (!smoothed && summed) plain_tiles(std::true_type{}, std::false_type{});
                    if (!smoothed && !summed) plain_tiles(std::false_type{}, std::false_type{});
                }
            }
        } else {
            if constexpr (Tiling::has_smooth_loop)
                if (pipeline.stages_means() && !is_summed()) plain_tiles(std::false_type{}, std::true_type{});
            if constexpr (Tiling::has_plain_loop)
                if (!smoothed && !is_summed()) plain_tiles(std::false_type{}, std::false_type{});
        }
        if (index >= range.end) break;
        step(index, !plain(index), std::true_type{}, smoothed);
    }

    // Check whether sums lost bits, then write the results.
    bool lost = false;
    if constexpr (Softmax::lowered)
        if (!again && !idle)
            lost = sums_are_too_small(softmax, softmax.o, problem, warp_row, range.begin * tile::tile_keys,
                                      range.end * tile::tile_keys,
                                      [&](int key, int j) { return pipeline.value_pair(key, j); });
    if constexpr (Softmax::lowered) lost = ptx::bar_red_or(lost);   // also the barrier of the other branch
    else ptx::bar_sync();   // every warp is done with the stages, over which the output goes
    write_results<Tiling>(softmax, shared, problem, first_row, warp_row, operands.value_level(), exact_sum);
    __syncwarp();   // lanes without rows reconverge
    return lost;
}

// Attention of the rows of a block, in one pass or two. exact_sum, or null, gets the sums of the weights before
// rounding, laid out as row_sum.
template <class Tiling, class Operands>
__device__ __forceinline__ void attention_blocks(typename Tiling::Shared &shared, const Operands &operands,
                                                 const AttentionOptions &options, float *exact_sum) {
    using Softmax =
        WeightedValues<typename Tiling::ValueFormat, Tiling::slices, Tiling::dim_v, Tiling::rolled, Tiling::is_half>;
    if constexpr (Softmax::lowered) {
#pragma unroll 1
        for (bool again = false; attend_rows_of_blocks<Tiling, Softmax>(shared, operands, options, again, exact_sum);
             again = true) {
        }
    } else {
        attend_rows_of_blocks<Tiling, Softmax>(shared, operands, options, false, exact_sum);
    }
}

}   // namespace op

// The entries of a unit on block formats, for the head dimensions VARIANT_dim and VARIANT_dim_v: of whole blocks and,
// where the shape has them, of half blocks.
#if UNIT_TAKES_HALF_BLOCKS
#define BLOCK_ATTENTION(ScoreFormat, ValueFormat)                                                                      \
    BLOCK_ATTENTION_ENTRY(ENTRY(), ScoreFormat, ValueFormat, false)                                                    \
    BLOCK_ATTENTION_ENTRY(ENTRY(_half), ScoreFormat, ValueFormat, true)
#else
#define BLOCK_ATTENTION(ScoreFormat, ValueFormat) BLOCK_ATTENTION_ENTRY(ENTRY(), ScoreFormat, ValueFormat, false)
#endif
#define BLOCK_ATTENTION_TILING(ScoreFormat, ValueFormat, half)                                                         \
    op::BlockTiling<ScoreFormat, ValueFormat, VARIANT_dim, VARIANT_dim_v, true, half>
#define BLOCK_ATTENTION_ENTRY(name, ScoreFormat, ValueFormat, half)                                                    \
    static_assert(BLOCK_ATTENTION_TILING(ScoreFormat, ValueFormat, half)::has_halves == UNIT_TAKES_HALF_BLOCKS);       \
    KERNEL(name, .threads = {BLOCK_ATTENTION_TILING(ScoreFormat, ValueFormat, half)::threads},                         \
           .shared_bytes = sizeof(BLOCK_ATTENTION_TILING(ScoreFormat, ValueFormat, half)::Shared),                     \
           .tile = {1, BLOCK_ATTENTION_TILING(ScoreFormat, ValueFormat, half)::rows, 1},                               \
           .min_blocks = BLOCK_ATTENTION_TILING(ScoreFormat, ValueFormat, half)::blocks,                               \
           .spill_bytes = BLOCK_ATTENTION_TILING(ScoreFormat, ValueFormat, half)::spill_bytes)                         \
    (const uint8_t *q_codes,  /* [batch, heads_kv, group, queries, q_bytes] */                                         \
     const uint8_t *q_scales, /* [batch, heads_kv, group, queries, q_blocks] */                                        \
     const uint8_t *k_tiles,  /* [batch, heads_kv, tiles, k_bytes]: tile::KeyTile */                                   \
     const uint8_t *v_tiles,  /* [batch, heads_kv, tiles, v_bytes]: tile::ValueTile */                                 \
     const float *q_global, const float *k_global, const float *v_global, /* [1] or null */                            \
     const float *mean_scores,                        /* [batch, heads_kv, tiles, query_blocks, group, 64] or null */  \
     const float *row_shift,                          /* [batch, heads_kv, group, queries] or null */                  \
     ATTENTION_ARRAYS(AS_PARAMETER) float *exact_sum, /* [splits, batch, heads_kv, group, queries] */                  \
     ATTENTION_SCALARS(AS_PARAMETER) int batch, int heads_kv, int group, int queries, int q_bytes, int q_blocks,       \
     int tiles, int k_bytes, int v_bytes, int query_blocks, int keys, int sequences, int cols, int splits,             \
     STRIDES_Q(q_codes), STRIDES_Q(q_scales), ATTENTION_STRIDES(STRIDES_MASK, STRIDES_Q)) {                            \
        using Tiling = BLOCK_ATTENTION_TILING(ScoreFormat, ValueFormat, half);                                         \
        op::attention_blocks<Tiling>(                                                                                  \
            shared<typename Tiling::Shared>(),                                                                         \
            op::BlockOperands{q_codes, q_scales, k_tiles, v_tiles, q_global, k_global, v_global, mean_scores, q_bytes, \
                              q_blocks, tiles, query_blocks, THE_STRIDES_Q(q_codes), THE_STRIDES_Q(q_scales)},         \
            ATTENTION_OPTIONS(row_shift, batch, heads_kv, group, queries, VARIANT_dim, keys, cols, sequences, splits), \
            exact_sum);                                                                                                \
    }
