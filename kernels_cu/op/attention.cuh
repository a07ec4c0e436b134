// Fused attention on operands of 16 bits: S = Q K^T, online softmax in registers, O = P V, a tile of keys at a time.
#pragma once

#include <cstdint>

#include "../kernel.cuh"
#include "../ptx/barrier.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/target.cuh"
#include "../tile/block_tiles.cuh"
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

// How a block divides the work: `warps` warps with `slices` times 16 rows each, tiles of `keys` keys in `stages` stages,
// `blocks` blocks to a multiprocessor, so that one computes scores while another multiplies.
//
// Two slices to a warp read K and V from shared memory half as often and issue fewer instructions to an MMA, which Ampere
// and Hopper need. On GeForce Blackwell an MMA takes five times as long: there warps of one slice leave room for two blocks
// in 100 KiB.
template <class Element_, int dim_, int dim_v_>
struct Tiling {
    using Element = Element_;
    static constexpr int dim = dim_, dim_v = dim_v_;
    static constexpr bool small = dim <= 128, wide = small && (!ptx::has_block_scaled_mma || dim <= 64);
    static constexpr int slices = wide ? 2 : 1;
    static constexpr int warps = small ? 4 : 8;
    static constexpr int blocks = small ? 2 : 1;
    static constexpr int keys = wide ? 64 : dim > 192 && ptx::shared_bytes_per_block < 128 * 1024 ? 16 : 32;
    static constexpr int stages = 2;
    static constexpr int threads = 32 * warps;
    static constexpr int rows = 16 * slices * warps;

    // The output of a block in a 16-bit type, over its Q.
    template <class Output>
    using OutputTile = tile::SharedTile<rows, dim_v * sizeof(Output)>;
    static_assert(dim_v <= dim, "the output is staged where Q was");

    struct Shared {
        tile::SharedTile<rows, dim * sizeof(Element)> q;
        struct {
            tile::SharedTile<keys, dim * sizeof(Element)> k;
            tile::SharedTile<keys, dim_v * sizeof(Element)> v;
        } stage[stages];
    };
    static_assert(sizeof(Shared) <= ptx::shared_bytes_per_block, "the tiles fit");
};

// Starts copying rows from `first_row` of a problem's Q; rows and columns that are not there become zeros. A thread keeps its
// chunk and goes down the rows; only its first row is divided into query and head. Called by the whole block.
template <class Element, int threads, class Tile>
__device__ inline void copy_queries(Tile &target, const Element *q, const StridesQ &strides, const Problem &problem, int first_row) {
    constexpr int chunk_elements = tile::elements_per_chunk<Element>;
    constexpr int columns = Tile::row_chunks, step = threads / columns, lanes = step * columns;   // a few idle where 3 divides
    if (threadIdx.x >= lanes) return;
    const int chunk = threadIdx.x % columns, group = problem.options.group;
    const int query_step = problem.query_of(step), group_step = problem.group_of(step);
    int row = threadIdx.x / columns, query = problem.query_of(first_row + row), head = problem.group_of(first_row + row);
#pragma unroll 4
    for (; row < Tile::rows; row += step) {
        const bool present = first_row + row < problem.rows && chunk * chunk_elements < problem.options.dim;
        const size_t at = present ? problem.at(strides, query, head) + chunk * chunk_elements : 0;
        ptx::cp_async_cg_16(target.address(row, chunk), q + at, present);
        query += query_step;
        head += group_step;
        if (head >= group) {
            head -= group;
            ++query;
        }
    }
}

// Starts copying rows that stand `row_bytes` apart; the first `rows` of them and the first `columns` columns are there, the
// others become zeros. Called by the whole block.
template <class Element, int threads, class Tile>
__device__ inline void copy_rows(Tile &target, const Element *source, uint32_t row_bytes, int rows, int columns) {
    constexpr int chunk_elements = tile::elements_per_chunk<Element>;
    constexpr int step = threads / Tile::row_chunks, lanes = step * Tile::row_chunks;
    if (lanes < threads && threadIdx.x >= lanes) return;
    const int row = threadIdx.x / Tile::row_chunks, chunk = threadIdx.x % Tile::row_chunks;
    const char *bytes = reinterpret_cast<const char *>(source);
    uint32_t offset = row * row_bytes + 16 * chunk;
    if (rows >= Tile::rows && columns >= Tile::row_chunks * chunk_elements) {
#pragma unroll
        for (int i = 0; i < ceil_div(Tile::rows, step); ++i, offset += step * row_bytes)
            if (Tile::rows % step == 0 || row + i * step < Tile::rows)
                ptx::cp_async_cg_16(target.address(row + i * step, chunk), bytes + offset, true);
    } else {
#pragma unroll 1   // once in a block, and code costs the loop beside it registers
        for (int i = row; i < Tile::rows; i += step, offset += step * row_bytes) {
            const bool present = i < rows && chunk * chunk_elements < columns;
            ptx::cp_async_cg_16(target.address(i, chunk), bytes + (present ? offset : 0), present);
        }
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

// Calls body(score, slice, half, key) for every score of a lane; `key` counts from the start of the tile.
template <class Order, int slices, int tiles, class Body>
__device__ inline void for_scores(tile::Accumulator (&s)[slices][tiles], Body &&body) {
#pragma unroll
    for (int slice = 0; slice < slices; ++slice)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int j = 0; j < tiles; ++j)
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    body(s[slice][j][2 * half + i], slice, half, Order::key(j, tile::accumulator_column(i)));
}

// Takes the scores of the tile that starts at `first_key` to units of log2 and hides the keys that their rows do not see.
template <class Order, int slices, int tiles>
__device__ inline void mask_scores(tile::Accumulator (&s)[slices][tiles], const Problem &problem, int warp_row, int first_key,
                                   float scale) {
    const AttentionOptions &options = problem.options;
    int query[slices][2], group[slices][2], first[slices][2], count[slices][2];   // visible: `count` keys of the tile from `first`
#pragma unroll
    for (int slice = 0; slice < slices; ++slice)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = min(warp_row + 16 * slice + tile::accumulator_row(2 * half), problem.rows - 1);
            query[slice][half] = problem.query_of(row);
            group[slice][half] = problem.group_of(row);
            first[slice][half] = problem.first_visible(query[slice][half]) - first_key;
            count[slice][half] = max(problem.end_visible(query[slice][half]) - first_key - first[slice][half], 0);
        }
    if (!problem.transforms_scores()) {
        for_scores<Order>(s, [&](float &score, int slice, int half, int key) {
            const bool visible = uint32_t(key - first[slice][half]) < uint32_t(count[slice][half]);
            score = visible ? score * (scale * log2_e) : -INFINITY;
        });
        return;
    }
    for_scores<Order>(s, [&](float &score, int, int, int) { score *= scale; });
    if (options.softcap > 0.0f)   // tanh x = 1 - 2 / (1 + e^2x), good to 2^-22 absolute
        for_scores<Order>(s, [&](float &score, int, int, int) {
            const float power = ptx::ex2_approx_ftz_f32(score * (2.0f * log2_e / options.softcap));
            score = options.softcap * (1.0f - 2.0f * ptx::rcp_approx_ftz_f32(1.0f + power));
        });
    for_scores<Order>(s, [&](float &score, int slice, int half, int key) {
        if (uint32_t(key - first[slice][half]) >= uint32_t(count[slice][half])) {
            score = -INFINITY;
            return;
        }
        if (options.mask)
            score += options.mask[problem.at(options.mask_strides, query[slice][half], group[slice][half], first_key + key)];
        if (options.allowed && !options.allowed[problem.at(options.allowed_strides, query[slice][half], group[slice][half], first_key + key)])
            score = -INFINITY;
        // A large finite mask stays finite: a row of nothing else is a mean, not a row without keys.
        if (score != -INFINITY) score = fmaxf(score * log2_e, -0x1.fffffep127f);
    });
}

// Writes the output of a warp's rows, columns g of which lie over the lanes as accumulators do, through `staging`, the
// warp's own rows of shared memory, so that whole 16-byte chunks leave. Each row begins at row_start(row); columns is a
// multiple of 8.
template <class Element, class Tiling, class Softmax, class RowStart>
__device__ inline void store_rows(const Softmax &softmax, typename Tiling::template OutputTile<Element> &staging, int warp_row,
                                  int rows, int columns, const float (&factor)[Tiling::slices][2], RowStart &&row_start) {
    __syncwarp();   // what stood in the staging rows was read
#pragma unroll
    for (int slice = 0; slice < Tiling::slices; ++slice)
#pragma unroll
        for (int j = 0; j < Tiling::dim_v / tile::mma_columns; ++j)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const tile::Accumulator &o = softmax.o[slice][j];
                uint32_t *chunk = reinterpret_cast<uint32_t *>(
                    &staging.at(warp_row + 16 * slice + tile::accumulator_row(2 * half), j));
                chunk[tile::accumulator_column(0) / 2] = tile::rounded_pair(o[2 * half + 1] * factor[slice][half],
                                                                            o[2 * half] * factor[slice][half], Element{});
            }
    __syncwarp();   // the rows are complete
    using Tile = typename Tiling::template OutputTile<Element>;
#pragma unroll 4
    for (int item = ptx::laneid(); item < 16 * Tiling::slices * Tile::row_chunks; item += 32) {
        const int row = item / Tile::row_chunks, chunk = item % Tile::row_chunks;
        if (row < rows && 8 * chunk < columns)
            *reinterpret_cast<uint4 *>(row_start(row) + 8 * chunk) = staging.at(warp_row + row, chunk);
    }
}

// Divides by the sums and writes what is asked for; splits write what they have.
template <class Tiling, class Softmax>
__device__ inline void write_results(Softmax &softmax, typename Tiling::Shared &shared, const Problem &problem, int first_row,
                                     int warp_row, float output_scale = 1.0f) {
    const AttentionOptions &options = problem.options;
    softmax.finish();
    float sink_share[Tiling::slices][2] = {};   // of the denominator
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
                    sink_share[slice][half] = ptx::ex2_approx_ftz_f32(sink[slice][half] - new_max[slice][half]);
    }

    float factor[Tiling::slices][2];
#pragma unroll
    for (int slice = 0; slice < Tiling::slices; ++slice)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = warp_row + 16 * slice + tile::accumulator_row(2 * half);
            const float sum = softmax.row_sum[slice][half] + sink_share[slice][half], max = softmax.row_max[slice][half];
            const float denominator = softmax.denominator(slice, half) + sink_share[slice][half];
            factor[slice][half] = output_scale * (options.partial ? 1.0f : denominator == 0.0f ? 0.0f : __frcp_rn(denominator));
            if (row >= problem.rows || tile::accumulator_column(0) != 0) continue;
            if (options.lse)
                options.lse[problem.row_at(row)] = sum == 0.0f ? -INFINITY : (max + ptx::lg2_approx_ftz_f32(sum)) * ln_2;
            if (options.row_max) options.row_max[problem.split_row_at(row)] = max;
            if (options.row_sum) options.row_sum[problem.split_row_at(row)] = denominator;
        }

    const int rows = problem.rows - warp_row;
    if (options.out_bf16)
        store_rows<__nv_bfloat16, Tiling>(softmax, reinterpret_cast<typename Tiling::template OutputTile<__nv_bfloat16> &>(shared.q),
                                          warp_row - first_row, rows, options.dim_v, factor, [&](int row) {
                                              return options.out_bf16 + problem.at(options.out_bf16_strides, warp_row + row);
                                          });
    if (options.out_f16)
        store_rows<__half, Tiling>(softmax, reinterpret_cast<typename Tiling::template OutputTile<__half> &>(shared.q),
                                   warp_row - first_row, rows, options.dim_v, factor, [&](int row) {
                                       return options.out_f16 + problem.at(options.out_f16_strides, warp_row + row);
                                   });
    if (!options.out_f32 && !options.partial) return;
#pragma unroll
    for (int slice = 0; slice < Tiling::slices; ++slice)
#pragma unroll
        for (int half = 0; half < 2; ++half) {   // four lanes of a row write 32 bytes together
            const int row = warp_row + 16 * slice + tile::accumulator_row(2 * half);
            if (row >= problem.rows) continue;
            float *target = options.partial ? options.partial + problem.split_row_at(row) * options.dim_v
                                            : options.out_f32 + problem.at(options.out_f32_strides, row);
#pragma unroll
            for (int j = 0; j < Tiling::dim_v / tile::mma_columns; ++j)
                if (j * tile::mma_columns < options.dim_v)
                    *reinterpret_cast<float2 *>(target + j * tile::mma_columns + tile::accumulator_column(0)) = {
                        softmax.o[slice][j][2 * half] * factor[slice][half], softmax.o[slice][j][2 * half + 1] * factor[slice][half]};
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

    if (range.begin < range.end) {   // rows that see no key leave at once, by way of the place where Q would land
        copy_queries<Element, Tiling::threads>(shared.q, operands.q, operands.q_strides, problem, first_row);
        copy_tile(range.begin);
    }
    ptx::cp_async_commit_group();

    OnlineSoftmax<Tiling::slices, Tiling::dim_v> softmax;
    softmax.start();
    const bool idle = warp_row >= problem.rows;
    const int warp_end = problem.end_visible(problem.query_of(min(warp_row + 16 * Tiling::slices, problem.rows) - 1));
    auto step = [&](int index, auto masked) {
        ptx::cp_async_wait_group<0>();
        ptx::bar_sync();   // this tile has landed for everyone; everyone is done with the stage that is filled next
        if (index + 1 < range.end) copy_tile(index + 1);
        ptx::cp_async_commit_group();
        const auto &stage = shared.stage[(index - range.begin) % Tiling::stages];
        // A warp without rows, or whose rows see nothing of this tile, only copies.
        if (idle || (masked && index * Tiling::keys >= warp_end)) return;
        tile::Accumulator s[Tiling::slices][Tiling::keys / tile::mma_columns];
        multiply_scores<Element, Tiling::dim>(s, shared.q, warp_row - first_row, stage.k);
        if constexpr (masked)
            mask_scores<tile::NaturalKeys>(s, problem, warp_row, index * Tiling::keys, options.scale);
        softmax.template take<masked>(s, options.scale * log2_e);
        accumulate_values<Element, Tiling::dim_v>(softmax.o, s, stage.v);
    };
    for (int index = range.begin; index < range.end; ++index) {
        for (; range.plain_begin <= index && index < range.plain_end; ++index) step(index, std::false_type{});
        if (index < range.end) step(index, std::true_type{});
    }
    write_results<Tiling>(softmax, shared, problem, first_row, warp_row);
}

}  // namespace op
