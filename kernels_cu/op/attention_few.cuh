// Attention of few queries: rows of keys and values as a cache holds them, expanded to 16 bits on their way into the MMAs.
//
// A block has 16 rows of one head of keys. Its warps have chunks of the keys to themselves, each with a ring of its own of rows on
// their way; four chunks make a node, which is written. What a row of the problem gives depends on nothing but the row and
// the keys that it sees: see tree.cuh.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../kernel.cuh"
#include "../ptx/barrier.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/target.cuh"
#include "../ptx/warp.cuh"
#include "../tile/cached_rows.cuh"
#include "../tile/fragment.cuh"
#include "attention.cuh"
#include "paged.cuh"
#include "problem.cuh"
#include "softmax.cuh"
#include "tree.cuh"

namespace op {

// What the entry is given of a cache.
struct PagedCache {
    const void *k, *k_scales, *v, *v_scales;   // [pages, heads_kv, page, ..]
    PageStrides k_strides, k_scales_strides, v_strides, v_scales_strides;
    const int *block_table;   // [sequences, table]
    long long table_stride;
    int page, table;
    const float *k_global;    // [heads_kv] or null: what codes times scales of keys are multiplied by
};

// The keys that a table of pages has room for.
__device__ inline int capacity(int table, int page) { return min(static_cast<long long>(table) * page, 0x7fffffffll - node_keys); }

// The parameters of every entry on pages behind its operands, in order, and the options made of them: arguments, then axes, then
// strides.
#define PAGED_ARRAYS                                                                                                        \
    const int *block_table, const int *key_ends, const int *query_starts, const int *query_ends, const float *k_global,     \
        const float *row_shift, float *partial, float *row_max, float *row_sum
#define STRIDES_PAGES(array) long long array##_page, long long array##_head, long long array##_token
#define THE_STRIDES_PAGES(array, bytes) {bytes * array##_page, bytes * array##_head, bytes * array##_token}
#define PAGED_OPTIONS                                                                                                       \
    {nullptr, nullptr, nullptr, row_shift, query_starts, query_ends, nullptr, key_ends, nullptr, nullptr, nullptr, nullptr, \
     partial, row_max, row_sum, scale, softcap, left, right, batch, heads_kv, group, queries, dim,                          \
     op::capacity(table, page), dim_v, sequences, int(gridDim.x) / heads_kv, {}, {}, {}, {}, {}}

// How a block divides the work. Rings of 16 KiB to a warp hide the way from memory with two blocks to a Hopper multiprocessor; one
// block fills a GeForce's shared memory, and its bandwidth needs no more.
template <class Keys_, class Values_, int dim_>
struct FewTiling {
    using Keys = tile::CachedUnit<Keys_, dim_, false>;
    using Values = tile::CachedUnit<Values_, dim_, true>;
    static constexpr int dim = dim_, slices = 1, rows = 16;
    static constexpr int warps = node_chunks, threads = 32 * warps;
    static constexpr int keys = 64, units = keys / tile::cached_rows;   // of a tile
    static constexpr int unit_bytes = sizeof(Keys) > sizeof(Values) ? sizeof(Keys) : sizeof(Values);
    static constexpr int most_slots = 16 * 1024 / unit_bytes;
    static constexpr int batch = most_slots >= 12 ? 4 : most_slots >= 6 ? 2 : 1;   // units that are waited for together
    static constexpr int batches = most_slots / batch > 4 ? 4 : most_slots / batch;
    static constexpr int slots = batch * batches;
    static_assert(batches >= 2, "one batch is on its way while another is read");
    static constexpr bool keeps_q = dim <= 128;
    static constexpr bool rolled = batch < units;
    static constexpr int exchanged = dim < 128 ? dim : 128;   // columns of a node that pass from warp to warp at once
    static constexpr int blocks = dim <= 128 ? 2 : 1;

    struct alignas(16) Slot {
        unsigned char bytes[unit_bytes];
    };
    struct Shared {
        Slot ring[warps][slots];
        tile::WarpNode<exchanged> node[warps - 1];
        tile::FragmentA q[keeps_q ? 1 : dim / 16][32];
    };
    static_assert(sizeof(Shared) <= ptx::shared_bytes_per_block, "the rings fit");
};

// Which tiles a warp goes through, node by node, eight units to a tile: keys, then values.
template <int units>
struct UnitCursor {
    int node, end_node, first_tile, end_tile, warp;
    int tile, tiles_end, part;

    __device__ UnitCursor(int first_node, int end_node, int first_tile, int end_tile, int warp)
        : node(first_node - 1), end_node(end_node), first_tile(first_tile), end_tile(end_tile), warp(warp), part(0) {
        next_node();
        settle();
    }
    // The tiles of this warp's chunk of the next node.
    __device__ void next_node() {
        constexpr int tiles = chunk_keys / (units * tile::cached_rows);
        ++node;
        const int first = (node * node_chunks + warp) * tiles;
        tile = max(first, first_tile);
        tiles_end = min(first + tiles, end_tile);
    }
    __device__ void settle() {
        while (tile >= tiles_end && node < end_node) next_node();
    }
    __device__ bool there() const { return node < end_node; }
    __device__ void advance() {
        if (++part < 2 * units) return;
        part = 0;
        ++tile;
        settle();
    }
};

// Drops the two accumulators of the first unit: so loops over units can be rolled.
template <int tiles>
__device__ inline void move_up(tile::Accumulator (&s)[tiles]) {
#pragma unroll
    for (int j = 0; j + 2 < tiles; ++j) tile::copy(s[j], s[j + 2]);
}

// O of a row is not divided: nodes go to partial, row_max and row_sum of the options, counted as splits.
template <class Tiling, class Element>
__device__ inline void attention_few(typename Tiling::Shared &shared, const Element *q, const StridesQ &q_strides,
                                     const PagedCache &cache, const AttentionOptions &options) {
    using Keys = typename Tiling::Keys;
    using Values = typename Tiling::Values;
    using KeyElement = typename Keys::Element;
    using ValueElement = typename Values::Element;
    static_assert(std::is_same_v<Element, KeyElement>, "Q and K are multiplied in one type");
    constexpr int dim = Tiling::dim, units = Tiling::units;
    const Problem problem(options, uint3(blockIdx));
    const int first_row = problem.row_block * Tiling::rows;
    if (first_row >= problem.rows) return;   // packed sequences have different lengths
    const int end_row = min(first_row + Tiling::rows, problem.rows), warp = threadIdx.x / 32;
    const int first_query = problem.query_of(first_row), last_query = problem.query_of(end_row - 1);

    // The keys that any row sees, and those that all do.
    const int first_key = problem.first_visible(first_query), end_key = max(problem.end_visible(last_query), first_key);
    const int first_common = problem.first_visible(last_query), end_common = problem.end_visible(first_query);
    const int end_tile = ceil_div(end_key, Tiling::keys);
    const int first_tile = end_key > first_key ? first_key / Tiling::keys : end_tile;

    const int nodes = ceil_div(options.keys, node_keys);   // of the whole table
    const int run = ceil_div(nodes, options.splits);
    const int first_node = problem.split * run, end_node = min(first_node + run, nodes);

    const PageTable table(cache.block_table + blockIdx.z * cache.table_stride, cache.page, tile::cached_rows);
    const PagedRows k_rows(cache.k, cache.k_strides, cache.k_scales, cache.k_scales_strides, problem.head,
                           options.dim * Keys::Format::bits / 8,
                           Keys::scale_bytes ? ceil_div(options.dim, at_least_one(Keys::Format::block)) : 0, Keys::scale_bytes);
    const PagedRows v_rows(cache.v, cache.v_strides, cache.v_scales, cache.v_scales_strides, problem.head,
                           options.dim_v * Values::Format::bits / 8,
                           Values::scale_bytes ? ceil_div(options.dim_v, at_least_one(Values::Format::block)) : 0, Values::scale_bytes);

    UnitCursor<units> coming(first_node, end_node, first_tile, end_tile, warp);
    int filled = 0;   // the slot that is filled next
    const auto fetch_unit = [&] {
        auto &slot = shared.ring[warp][filled];
        const int first = coming.tile * Tiling::keys + coming.part % units * tile::cached_rows;
        const bool whole = table.shift >= 0 && first >= first_key && first + tile::cached_rows <= end_key;
        const auto copy = [&](auto &unit, const PagedRows &from) {
            const auto row_of = [&](const char *base, const PageStrides &strides, int key) -> const char * {
                if (first + key < first_key || first + key >= end_key) return nullptr;
                const PageTable::Place place = table.place(first + key);
                return strides.row(base, place.page, place.row);
            };
            const auto scales_of = [&](int key) { return row_of(from.scales, from.scale_strides, key); };
            if (whole) {
                const UnitPlace place(table, from, first);
                unit.copy(from.chunks, place.codes, static_cast<uint32_t>(from.code_strides.token));
                if (from.aligned) unit.copy_scales(from.scale_bytes, place.scales, static_cast<uint32_t>(from.scale_strides.token));
            } else {
                unit.copy(from.chunks, [&](int key) { return row_of(from.codes, from.code_strides, key); });
            }
            if (!whole || !from.aligned) unit.copy_scales(from.scale_bytes, from.aligned, scales_of);
        };
        if (coming.part < units) copy(reinterpret_cast<Keys &>(slot), k_rows);
        else copy(reinterpret_cast<Values &>(slot), v_rows);
        coming.advance();
        filled = filled + 1 == Tiling::slots ? 0 : filled + 1;
    };
    const auto fetch = [&] {   // tiles are whole batches
        if (coming.there())
#pragma unroll 1
            for (int i = 0; i < Tiling::batch; ++i) fetch_unit();
        ptx::cp_async_commit_group();
    };
#pragma unroll 1
    for (int i = 0; i < Tiling::batches - 1; ++i) fetch();

    tile::FragmentA kept[Tiling::keeps_q ? dim / 16 : 1];
    {
        tile::FragmentA all[dim / 16];
        tile::load_queries<Element, dim>(all, options.dim, [&](int row) {
            return first_row + row < end_row ? q + problem.at(q_strides, first_row + row) : nullptr;
        });
#pragma unroll
        for (int step = 0; step < dim / 16; ++step)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if constexpr (Tiling::keeps_q) kept[step][i] = all[step][i];
                else shared.q[step][ptx::laneid()][i] = all[step][i];   // every warp writes the same
            }
        if constexpr (!Tiling::keeps_q) ptx::bar_sync();   // Q is there
    }

    const float scale = options.scale * Keys::Format::lift * (cache.k_global ? cache.k_global[problem.head] : 1.0f);
    const float factor = score_factor(problem, scale);
    const int lane_queries[2] = {problem.query_of(first_row + tile::accumulator_row(0)),
                                 problem.query_of(first_row + tile::accumulator_row(2))};
    int read = 0;   // the slot that is read next
    const auto next_batch = [&] {
        ptx::cp_async_wait_group<Tiling::batches - 2>();
        ptx::bar_warp_sync();   // the batch has landed for all lanes, and all are done with the one before
        fetch();
        auto *first = shared.ring[warp] + read;
        read = read + Tiling::batch == Tiling::slots ? 0 : read + Tiling::batch;
        return first;
    };

    UnitCursor<units> here(first_node, end_node, first_tile, end_tile, warp);
#pragma unroll 1
    for (int node = first_node; node < end_node; ++node) {
        OnlineSoftmax<1, dim> softmax;
        softmax.start();
#pragma unroll 1
        for (; here.node == node; here.tile++, here.settle()) {
            const int tile_key = here.tile * Tiling::keys;
            tile::Accumulator s[1][2 * units];
#pragma unroll (Tiling::rolled ? 1 : units)
            for (int first = 0; first < units; first += Tiling::batch) {
                const auto *batch = next_batch();
#pragma unroll
                for (int unit = 0; unit < Tiling::batch; ++unit) {
                    const auto &keys = reinterpret_cast<const Keys &>(batch[unit]);
                    tile::Accumulator sum[2] = {};
#pragma unroll
                    for (int half = 0; half < 2; ++half)
                        keys.for_keys(half, [&](int step, const tile::FragmentB &b) {
                            if constexpr (Tiling::keeps_q) tile::multiply(sum[half], kept[step], b, Element{});
                            else tile::multiply(sum[half], shared.q[step][ptx::laneid()], b, Element{});
                        });
                    move_up(s[0]);
                    tile::copy(s[0][2 * units - 2], sum[0]);
                    tile::copy(s[0][2 * units - 1], sum[1]);
                }
            }
            const bool common = tile_key >= first_common && tile_key + Tiling::keys <= end_common;
            if (!common || problem.transforms_scores()) mask_scores<tile::NaturalKeys>(s, problem, first_row, tile_key, scale);
            softmax.take(s, factor);
            // Zero times a value that is not finite is NaN: where rows see different keys, those of each query are multiplied
            // with zeros for the values that it does not see.
            const bool isolates = !common && first_query != last_query;
            const auto multiply_values = [&](const Values &values, const tile::FragmentA &p, int first) {
                if (!isolates) {
                    values.for_values([&](int j, const tile::FragmentB &b) { tile::multiply(softmax.o[0][j], p, b, ValueElement{}); });
                    return;
                }
#pragma unroll 1
                for (int query = first_query; query <= last_query; ++query) {
                    const int begin = problem.first_visible(query) - first, end = problem.end_visible(query) - first;
                    const auto seen = tile::pair_masks([&](int key) { return key >= begin && key < end; });
                    values.for_values([&](int j, const tile::FragmentB &b) {
                        const tile::FragmentB shown = {b[0] & seen.pair[0], b[1] & seen.pair[1]};
                        tile::Accumulator sum;
                        tile::copy(sum, softmax.o[0][j]);
                        tile::multiply(sum, p, shown, ValueElement{});
#pragma unroll
                        for (int i = 0; i < 4; ++i)
                            if (lane_queries[i / 2] == query) softmax.o[0][j][i] = sum[i];
                    });
                }
            };
#pragma unroll (Tiling::rolled ? 1 : units)
            for (int first = 0; first < units; first += Tiling::batch) {
                const auto *batch = next_batch();
#pragma unroll
                for (int unit = 0; unit < Tiling::batch; ++unit) {
                    tile::FragmentA p;
                    tile::accumulators_to_a(p, s[0][0], s[0][1], ValueElement{});
                    move_up(s[0]);
                    multiply_values(reinterpret_cast<const Values &>(batch[unit]), p, tile_key + (first + unit) * tile::cached_rows);
                }
            }
        }
        softmax.finish();
#pragma unroll
        for (int half = 0; half < 2; ++half)
            if (softmax.row_sum[0][half] == 0.0f) softmax.row_max[0][half] = -INFINITY;   // it saw no key

        // Chunks 0 and 1, 2 and 3, then both.
        const auto send = [&](tile::WarpNode<Tiling::exchanged> &to, int first) {
#pragma unroll
            for (int j = 0; j < Tiling::exchanged / 8; ++j) {
                const tile::Accumulator &o = softmax.o[0][first + j];
                to.accumulator(j) = {o[0], o[1], o[2], o[3]};
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                to.row_max(half) = softmax.row_max[0][half];
                to.row_sum(half) = softmax.row_sum[0][half];
            }
        };
        const auto take = [&](tile::WarpNode<Tiling::exchanged> &from, int first) {
            const NodeSum sums[2] = {{softmax.row_max[0][0], from.row_max(0)}, {softmax.row_max[0][1], from.row_max(1)}};
#pragma unroll
            for (int j = 0; j < Tiling::exchanged / 8; ++j) {
                const float4 right = from.accumulator(j);
                tile::Accumulator &o = softmax.o[0][first + j];
                o[0] = sums[0].add(o[0], right.x), o[1] = sums[0].add(o[1], right.y);
                o[2] = sums[1].add(o[2], right.z), o[3] = sums[1].add(o[3], right.w);
            }
            if (first + Tiling::exchanged / 8 < dim / 8) return;   // the maxima are needed as they were
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                softmax.row_sum[0][half] = sums[half].add(softmax.row_sum[0][half], from.row_sum(half));
                softmax.row_max[0][half] = sums[half].max;
            }
        };
#pragma unroll
        for (int level = 1; level < Tiling::warps; level *= 2)
#pragma unroll
            for (int first = 0; first < dim / 8; first += Tiling::exchanged / 8) {
                if (warp % (2 * level) == level) send(shared.node[warp - 1], first);
                ptx::bar_sync();   // the right sides are there
                if (warp % (2 * level) == 0) take(shared.node[warp + level - 1], first);
                if (first + Tiling::exchanged / 8 < dim / 8) ptx::bar_sync();   // and were read
            }
        if (warp != 0) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = first_row + tile::accumulator_row(2 * half);
            if (row >= end_row) continue;
            const size_t at = size_t(node) * options.batch * options.heads_kv * options.group * options.queries + problem.row_at(row);
            const float max = softmax.row_max[0][half];
            if (tile::accumulator_column(0) == 0) {
                options.row_max[at] = max;
                options.row_sum[at] = softmax.row_sum[0][half];
            }
            if (max == -INFINITY) continue;   // counts nothing, whatever stands there
            float *target = options.partial + at * options.dim_v;
            const int column = tile::first_value_column<dim>();
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int j = 0; j < dim / 8; j += 4) {
                    const int at = column + i * (dim / 8) + j;
                    if (at >= options.dim_v) continue;
                    const auto value = [&](int k) { return softmax.o[0][j + k][2 * half + i] * Values::Format::lift; };
                    *reinterpret_cast<float4 *>(target + at) = {value(0), value(1), value(2), value(3)};
                }
        }
    }
}

}  // namespace op
