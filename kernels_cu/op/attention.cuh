// Fused attention on operands of 16 bits: S = Q K^T, online softmax in registers, O = P V, a tile of keys at a time.
#pragma once

#include <cstdint>

#include "../kernel.cuh"
#include "../ptx/barrier.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/target.cuh"
#include "../tile/format.cuh"
#include "../tile/fragment.cuh"
#include "../tile/shared.cuh"
#include "problem.cuh"
#include "softmax.cuh"

namespace op {

// Q, K and V of bf16 or f16, in place.
template <class Element>
struct Operands {
    const Element *q, *k, *v;
    StridesQ q_strides;
    StridesK k_strides, v_strides;
};

// How a block divides the work: `warps` warps with `slices` times 16 rows each, tiles of `keys` keys in `stages` stages.
// Two slices to a warp read K and V half as often, which issue-bound GPUs need; GeForce Blackwell, whose MMA takes four
// times as long, gains more by twice as many warps.
template <class Element_, int dim_, int dim_v_>
struct Tiling {
    using Element = Element_;
    static constexpr int dim = dim_, dim_v = dim_v_;
    static constexpr bool small = dim <= 128;
    static constexpr int slices = small && !ptx::has_block_scaled_mma ? 2 : 1;
    static constexpr int warps = small && slices == 2 ? 4 : dim <= 192 ? 8 : 4;
    static constexpr int threads = 32 * warps;
    static constexpr int rows = 16 * slices * warps;
    static constexpr int keys = small ? 64 : 32;
    static constexpr int stages = 2;

    struct Shared {
        tile::SharedTile<rows, dim * sizeof(Element)> q;
        struct {
            tile::SharedTile<keys, dim * sizeof(Element)> k;
            tile::SharedTile<keys, dim_v * sizeof(Element)> v;
        } stage[stages];
    };
    static_assert(sizeof(Shared) <= 99 * 1024, "a block has 99 KiB on GeForce");
};

// Starts copying a tile whose row r begins at row_start(r), null for a row of zeros; columns from `columns` on become
// zeros, too. Called by the whole block.
template <class Element, int threads, class Tile, class RowStart>
__device__ inline void gather_rows(Tile &target, int columns, RowStart &&row_start) {
    constexpr int chunk_elements = tile::elements_per_chunk<Element>;
#pragma unroll 1   // rare, and code beside the steady loop costs it registers
    for (int item = threadIdx.x; item < Tile::rows * Tile::row_chunks; item += threads) {
        const int row = item / Tile::row_chunks, chunk = item % Tile::row_chunks;
        const Element *start = row_start(row);
        const bool present = start && chunk * chunk_elements < columns;
        ptx::cp_async_cg_16(target.address(row, chunk), start + (present ? chunk * chunk_elements : 0), present);
    }
}

// The same for rows that stand `row_bytes` apart; all `rows` of them are there, and all columns, where that is the tile's
// number. A thread keeps its chunk and goes down the rows, so that a copy costs an addition.
template <class Element, int threads, class Tile>
__device__ inline void copy_rows(Tile &target, const Element *source, uint32_t row_bytes, int rows, int columns) {
    constexpr int chunk_elements = tile::elements_per_chunk<Element>;
    if (rows < Tile::rows || columns < Tile::row_chunks * chunk_elements || threads % Tile::row_chunks != 0) {
        gather_rows<Element, threads>(target, columns, [&](int row) {
            return row < rows ? reinterpret_cast<const Element *>(reinterpret_cast<const char *>(source) + row * size_t(row_bytes))
                              : nullptr;
        });
        return;
    }
    constexpr int step = threads / Tile::row_chunks;
    const int row = threadIdx.x / Tile::row_chunks, chunk = threadIdx.x % Tile::row_chunks;
    uint32_t offset = row * row_bytes + 16 * chunk;
#pragma unroll
    for (int i = 0; i < Tile::rows / step; ++i) {
        ptx::cp_async_cg_16(target.address(row + i * step, chunk), reinterpret_cast<const char *>(source) + offset, true);
        offset += step * row_bytes;
    }
}

// s = Q K^T for the 16-row slices of Q from `first_row` and all keys of a tile; s[..][j] covers keys 8 j .. 8 j + 7.
template <class Element, int dim, int slices, int tiles, class QueryTile, class KeyTile>
__device__ inline void multiply_scores(tile::Accumulator (&s)[slices][tiles], const QueryTile &q, int first_row, const KeyTile &k) {
#pragma unroll
    for (auto &slice : s)
#pragma unroll
        for (auto &accumulator : slice)
#pragma unroll
            for (float &element : accumulator) element = 0.0f;
#pragma unroll
    for (int step = 0; step < dim / 16; ++step) {
        tile::FragmentA a[slices];
#pragma unroll
        for (int slice = 0; slice < slices; ++slice) tile::load_a(a[slice], q, first_row + 16 * slice, 2 * step);
#pragma unroll
        for (int pair = 0; pair < tiles / 2; ++pair) {
            tile::FragmentB b[2];
            tile::load_b(b, k, 16 * pair, 2 * step);
#pragma unroll
            for (int slice = 0; slice < slices; ++slice)
#pragma unroll
                for (int half = 0; half < 2; ++half) tile::multiply(s[slice][2 * pair + half], a[slice], b[half], Element{});
        }
    }
}

// o += P V for a tile of V [keys, dim_v]; P is rounded to the type of V.
template <class Element, int dim_v, int slices, int tiles, class Tile>
__device__ inline void accumulate_values(tile::Accumulator (&o)[slices][dim_v / tile::mma_columns],
                                         const tile::Accumulator (&p)[slices][tiles], const Tile &v) {
#pragma unroll
    for (int step = 0; step < tiles / 2; ++step) {   // 16 keys
        tile::FragmentA a[slices];
#pragma unroll
        for (int slice = 0; slice < slices; ++slice)
            tile::accumulators_to_a(a[slice], p[slice][2 * step], p[slice][2 * step + 1], Element{});
#pragma unroll
        for (int columns = 0; columns < dim_v / 16; ++columns) {
            tile::FragmentB b[2];
            tile::load_b_transposed(b, v, 16 * step, 2 * columns);
#pragma unroll
            for (int slice = 0; slice < slices; ++slice)
#pragma unroll
                for (int half = 0; half < 2; ++half) tile::multiply(o[slice][2 * columns + half], a[slice], b[half], Element{});
        }
    }
}

// Takes the scores of a tile that starts at `first_key` to units of log2 and hides the keys that their rows do not see.
template <int slices, int tiles>
__device__ inline void mask_scores(tile::Accumulator (&s)[slices][tiles], const Problem &problem, int warp_row, int first_key) {
    const bool transforms = problem.transforms_scores();
    const float factor = problem.options.scale * log2_e;
#pragma unroll
    for (int slice = 0; slice < slices; ++slice)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = warp_row + 16 * slice + tile::accumulator_row(2 * half);
            const int query = problem.query_of(row), group = problem.group_of(row);
            const int first = problem.first_visible(query), end = row < problem.rows ? problem.end_visible(query) : 0;
#pragma unroll
            for (int j = 0; j < tiles; ++j)
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; ++i) {
                    const int key = first_key + j * tile::mma_columns + tile::accumulator_column(i);
                    float &score = s[slice][j][i];
                    if (key < first || key >= end)
                        score = -INFINITY;
                    else
                        score = transforms ? problem.transformed(score, query, group, key) : score * factor;
                }
        }
}

// Two neighbouring columns of a row of the output, in whatever types are asked for; `columns` of them exist.
template <class Element>
__device__ inline void store_pair(Element *target, float left, float right, int columns) {
    if (columns > 0) target[0] = Element(left);
    if (columns > 1) target[1] = Element(right);
}

// Divides by the sums and writes what is asked for; splits write what they have.
template <class Tiling, class Softmax>
__device__ inline void write_results(Softmax &softmax, const Problem &problem, int warp_row) {
    const AttentionOptions &options = problem.options;
    softmax.finish();
    if (options.sinks && problem.split == 0) {   // one more key, which has no value
        float new_max[Tiling::slices][2], sink[Tiling::slices][2];
#pragma unroll
        for (int slice = 0; slice < Tiling::slices; ++slice)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int group = problem.group_of(warp_row + 16 * slice + tile::accumulator_row(2 * half));
                sink[slice][half] = options.sinks[problem.head * options.group + group] * log2_e;
                new_max[slice][half] = fmaxf(softmax.row_max[slice][half], ceilf(sink[slice][half]));
            }
        softmax.raise(new_max);
#pragma unroll
        for (int slice = 0; slice < Tiling::slices; ++slice)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                if (sink[slice][half] > -INFINITY)
                    softmax.row_sum[slice][half] += ptx::ex2_approx_ftz_f32(sink[slice][half] - new_max[slice][half]);
    }
#pragma unroll
    for (int slice = 0; slice < Tiling::slices; ++slice)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = warp_row + 16 * slice + tile::accumulator_row(2 * half);
            if (row >= problem.rows) continue;
            const float sum = softmax.row_sum[slice][half], max = softmax.row_max[slice][half];
            const float divide = options.partial ? 1.0f : sum == 0.0f ? 0.0f : 1.0f / sum;
            const size_t bf16_at = problem.at(options.out_bf16_strides, row), f16_at = problem.at(options.out_f16_strides, row),
                         f32_at = problem.at(options.out_f32_strides, row), partial_at = problem.split_row_at(row) * options.dim_v;
#pragma unroll
            for (int j = 0; j < Tiling::dim_v / tile::mma_columns; ++j) {
                const int column = j * tile::mma_columns + tile::accumulator_column(0), columns = options.dim_v - column;
                const float left = softmax.o[slice][j][2 * half] * divide, right = softmax.o[slice][j][2 * half + 1] * divide;
                if (options.out_bf16) store_pair(options.out_bf16 + bf16_at + column, left, right, columns);
                if (options.out_f16) store_pair(options.out_f16 + f16_at + column, left, right, columns);
                if (options.out_f32) store_pair(options.out_f32 + f32_at + column, left, right, columns);
                if (options.partial) store_pair(options.partial + partial_at + column, left, right, columns);
            }
            if (tile::accumulator_column(0) != 0) continue;
            if (options.lse)
                options.lse[problem.row_at(row)] = sum == 0.0f ? -INFINITY : (max + ptx::lg2_approx_ftz_f32(sum)) * ln_2;
            if (options.row_max) options.row_max[problem.split_row_at(row)] = max;
            if (options.row_sum) options.row_sum[problem.split_row_at(row)] = sum;
        }
}

// O = softmax(scale Q K^T) V for Tiling::rows rows of one head of K and V (and one split of its keys).
template <class Tiling>
__device__ inline void attention(typename Tiling::Shared &shared, const Operands<typename Tiling::Element> &operands,
                                 const AttentionOptions &options) {
    using Element = typename Tiling::Element;
    const Problem problem(options);
    // Where a mask is causal, later rows have more to do; they start first.
    const int first_row = (gridDim.x - 1 - blockIdx.x) * Tiling::rows;
    if (first_row >= problem.rows) return;   // packed sequences have different lengths
    const int end_row = min(first_row + Tiling::rows, problem.rows);
    const int warp_row = first_row + threadIdx.x / 32 * 16 * Tiling::slices;

    const Element *k = operands.k + problem.at(operands.k_strides), *v = operands.v + problem.at(operands.v_strides);
    const uint32_t k_row_bytes = operands.k_strides.key * sizeof(Element), v_row_bytes = operands.v_strides.key * sizeof(Element);
    const TileRange<Tiling::keys> range(problem, first_row, end_row);
    auto copy_tile = [&](int index) {
        auto &stage = shared.stage[(index - range.begin) % Tiling::stages];
        const int first = index * Tiling::keys;
        copy_rows<Element, Tiling::threads>(stage.k, k + first * operands.k_strides.key, k_row_bytes, problem.keys - first,
                                            options.dim);
        copy_rows<Element, Tiling::threads>(stage.v, v + first * operands.v_strides.key, v_row_bytes, problem.keys - first,
                                            options.dim_v);
    };

    gather_rows<Element, Tiling::threads>(shared.q, options.dim, [&](int row) {
        return first_row + row < problem.rows ? operands.q + problem.at(operands.q_strides, first_row + row) : nullptr;
    });
    if (range.begin < range.end) copy_tile(range.begin);
    ptx::cp_async_commit_group();

    OnlineSoftmax<Tiling::slices, Tiling::dim_v> softmax;
    softmax.start();
    auto step = [&](int index, auto masked) {
        ptx::cp_async_wait_group<0>();
        ptx::bar_sync();   // this tile has landed for everyone; everyone is done with the stage that is filled next
        if (index + 1 < range.end) copy_tile(index + 1);
        ptx::cp_async_commit_group();
        const auto &stage = shared.stage[(index - range.begin) % Tiling::stages];
        tile::Accumulator s[Tiling::slices][Tiling::keys / tile::mma_columns];
        multiply_scores<Element, Tiling::dim>(s, shared.q, warp_row - first_row, stage.k);
        if constexpr (masked) mask_scores(s, problem, warp_row, index * Tiling::keys);
        softmax.template take<masked>(s, options.scale * log2_e);
        accumulate_values<Element, Tiling::dim_v>(softmax.o, s, stage.v);
    };
    for (int index = range.begin; index < range.end; ++index) {
        for (; range.plain_begin <= index && index < range.plain_end; ++index) step(index, std::false_type{});
        if (index < range.end) step(index, std::true_type{});
    }
    write_results<Tiling>(softmax, problem, warp_row);
}

}  // namespace op
