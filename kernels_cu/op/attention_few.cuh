// Attention of few queries. Keys and values stay in the format of the cache or operand and are expanded to 16 bits on
// their way into the MMAs.
//
// A block computes 16 rows of one head of K and V. Each of its four warps has chunks of the keys of its own and a ring
// of units in flight. The block adds four chunks to a node, which it writes. The result of a row depends only on the
// row and on the keys that it sees: see tree.cuh. Formats and places of keys are chosen at run time, once per unit, so
// any format of keys combines with any format of values. Complete units within one page are copied in whole rounds of
// the warp, others row by row.
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
#include "../tile/lanes.cuh"
#include "attention.cuh"
#include "paged.cuh"
#include "problem.cuh"
#include "softmax.cuh"
#include "tree.cuh"

namespace op {

using tile::RowFormat;

// Keys or values: rows [pages, heads_kv, page, width] in bytes with scales [pages, heads_kv, page, blocks], or tiles of
// block_tiles.cuh [batch, heads_kv, tiles, width], which contain their scales.
struct CachedArray {
    const void *codes, *scales;   // scales may be null
    PageStrides strides, scale_strides;
    RowFormat format;
    int tile_dim;   // the head dimension of tiles, with padding; 0: rows

    __device__ bool has_columns() const {
        return tile_dim > 0 && format != RowFormat::plain;
    }   // whether units of values are columns of V: see tile::CachedUnits
};

// What the entry takes besides queries and options.
struct CachedKeys {
    CachedArray k, v;
    const int *block_table;   // [sequences, table]; null: batches or packed sequences, one after the other
    long long table_stride;
    int page, nodes;
    const float *q_global, *k_global;   // [1] and [levels], or null: factors of codes times scales
    int levels;                         // 1, or the number of heads
};

// The number of keys that `table` pages hold, limited so that sums of key numbers fit 32 bits.
__device__ inline int capacity(int table, int page) {
    return min(static_cast<long long>(table) * page, 0x7fffffffll - node_keys);
}

// How a block divides the work. A block has one warp for each quarter of a multiprocessor. With two blocks to a
// multiprocessor, a quarter computes for one while the other waits for data. On GeForce Blackwell the rings of two
// blocks are just long enough for its bandwidth.
template <class Element_, int dim_>
struct FewTiling {
    using Element = Element_;
    using Units = tile::CachedUnits<Element, dim_>;
    static constexpr int dim = dim_, rows = 16;
    static constexpr int warps = node_chunks, threads = 32 * warps;
    static constexpr int keys = tile::tile_keys, units = keys / tile::cached_rows;   // of a tile
    static constexpr int exchanged = dim <= 128 ? 32 : 64;   // columns of a node that warps exchange at once
    static constexpr int blocks = dim <= 128 ? 2 : 1;
    using Node = tile::WarpNode<exchanged>;
    static constexpr int spilled = dim <= 128 ? 96 : 800;   // bytes; the O of large heads leaves few registers
    static constexpr bool keeps_q = dim <= 64;              // in registers; else in shared memory

    // Shared memory of a warp: first room for an expanded unit of columns or for a node, then the ring.
    static constexpr int unit_bytes = sizeof(typename Units::Columns);
    static constexpr int expanded_bytes = unit_bytes > int(sizeof(Node)) ? unit_bytes : int(sizeof(Node));
    static constexpr int arena_bytes = tile::few_arena_bytes<dim>;
    struct alignas(128) Arena {
        char bytes[arena_bytes];
    };
    struct Shared {
        Arena arena[warps];
        tile::FragmentA q[keeps_q ? 1 : dim / 16][32];
    };
    static_assert(sizeof(Node) % 128 == 0 && sizeof(Shared) <= ptx::shared_bytes_per_block, "the rings fit");
};

// A warp's ring of units. `begin` is its offset in the arena, `unit_bytes` the size of a unit. A warp waits for a
// `batch` of units at once; the ring has `batches` of them. in_place: columns of V are expanded in their unit, which
// has room for that if keys have 16 bits.
struct FewRing {
    int begin, unit_bytes, batch, batches;
    bool in_place;

    template <class Tiling>
    __device__ static FewRing of(const CachedKeys &cached, Tiling) {
        using Units = typename Tiling::Units;
        FewRing ring;
        ring.in_place = cached.k.format == RowFormat::plain;
        ring.begin = ring.in_place || !cached.v.has_columns() ? sizeof(typename Tiling::Node) : Tiling::expanded_bytes;
        ring.unit_bytes =
            max(Units::bytes(cached.k.format, false), Units::bytes(cached.v.format, cached.v.has_columns()));
        const int fitting = (Tiling::arena_bytes - ring.begin) / ring.unit_bytes;
        ring.batch = fitting >= 16 ? 4 : fitting >= 8 ? 2 : 1;
        ring.batches = min(fitting / ring.batch, 4);
        return ring;
    }

    // Waits until the oldest batch has landed, with `batches` - 1 in flight.
    __device__ void wait() const {
        if (batches == 4) ptx::cp_async_wait_group<2>();
        else if (batches == 3) ptx::cp_async_wait_group<1>();
        else ptx::cp_async_wait_group<0>();
    }
};

// The tiles of a warp in order, node by node. A tile has 2 `units` units: first its keys, then its values.
template <int units>
struct UnitCursor {
    int node, end_node, first_tile, end_tile, warp;
    int tile, tiles_end, part;   // tile; end of the chunk's tiles; unit of the tile

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
    // Moves on to the next node in which this warp has a tile, unless it is at a tile.
    __device__ void settle() {
        while (tile >= tiles_end && node < end_node) next_node();
    }
    __device__ bool there() const { return node < end_node; }
    __device__ void next_tile() {
        part = 0;
        ++tile;
        settle();
    }
    __device__ void advance(int by) {
        part += by;
        if (part == 2 * units) next_tile();
    }
};

// s[j] = s[j + by]. Rolled loops over units then use the same registers, s[0] or the last ones, in every iteration.
template <int by, int tiles>
__device__ inline void move_up(tile::Accumulator (&s)[tiles]) {
#pragma unroll
    for (int j = 0; j + by < tiles; ++j) tile::copy(s[j], s[j + by]);
}

// Rounds the weights of each 16 keys, two accumulators, to an A fragment, stored as the bits of accumulator i.
template <class Element, int tiles>
__device__ inline void round_weights(tile::Accumulator (&s)[tiles]) {
#pragma unroll
    for (int i = 0; i < tiles / 2; ++i) {
        tile::FragmentA p;
        tile::accumulators_to_a(p, s[2 * i], s[2 * i + 1], Element{});
#pragma unroll
        for (int j = 0; j < 4; ++j) s[i][j] = __uint_as_float(p[j]);
    }
}
// The A fragment that round_weights() stored in an accumulator.
__device__ inline void weights_of(tile::FragmentA &p, const tile::Accumulator &s) {
#pragma unroll
    for (int j = 0; j < 4; ++j) p[j] = __float_as_uint(s[j]);
}

// Attention of the 16 rows of a block for one split of the nodes. Nodes are undivided sums and go to partial, row_max
// and row_sum of the options, as splits do.
template <class Tiling, class Element>
__device__ __forceinline__ void attention_few(typename Tiling::Shared &shared, const Element *q,
                                              const StridesQ &q_strides, const CachedKeys &cached,
                                              const AttentionOptions &options) {
    using Units = typename Tiling::Units;
    using Columns = typename Units::Columns;
    constexpr int dim = Tiling::dim, units = Tiling::units, columns = dim / tile::mma_columns;
    // The rows of this block.
    const Problem problem(options, uint3(blockIdx));
    const int first_row = problem.row_block * Tiling::rows;
    if (first_row >= problem.rows) return;   // packed sequences have different lengths
    const int end_row = min(first_row + Tiling::rows, problem.rows), warp = threadIdx.x / 32;
    const int first_query = problem.query_of(first_row), last_query = problem.query_of(end_row - 1);

    // The keys that any row sees, and the keys that all rows see.
    const int first_key = problem.first_visible(first_query), end_key = max(problem.end_visible(last_query), first_key);
    const int first_common = problem.first_visible(last_query), end_common = problem.end_visible(first_query);
    const int end_tile = ceil_div(end_key, Tiling::keys);
    const int first_tile = end_key > first_key ? first_key / Tiling::keys : end_tile;

    // The nodes of this split.
    const int run = ceil_div(cached.nodes, options.splits);
    const int first_node = problem.split * run, end_node = min(first_node + run, cached.nodes);

    // Where rows of keys and values are in memory.
    const PageTable table = cached.block_table ? PageTable(cached.block_table + blockIdx.z * cached.table_stride,
                                                           cached.page, tile::cached_rows)
                                               : PageTable(problem.batch, problem.first_key);
    const auto rows_of = [&](const CachedArray &array, int dim) {
        return PagedRows(array.codes, array.strides, array.scales, array.scale_strides, problem.head,
                         dim * tile::bits_of(array.format) / 8, tile::blocks_of(array.format, dim));
    };
    const PagedRows k_rows = rows_of(cached.k, options.dim), v_rows = rows_of(cached.v, options.dim_v);

    // The ring, and the cursor of the copies.
    char *const arena = shared.arena[warp].bytes;
    const FewRing ring = FewRing::of(cached, Tiling{});
    const int ring_end = ring.begin + ring.batches * ring.batch * ring.unit_bytes;
    UnitCursor<units> coming(first_node, end_node, first_tile, end_tile, warp);
    int filled = ring.begin;   // offset of the next unit
    // The pages of the units of a tile: lanes i, i + 4, ... hold that of unit i. They are loaded one tile ahead.
    const auto pages_of = [&](const UnitCursor<units> &cursor) {
        if (table.shift < 0 || !cursor.there()) return 0;
        return table.page_of(
            min(cursor.tile * Tiling::keys + tile::lane_unit<units>() * tile::cached_rows, end_key - 1));
    };
    int pages_here = 0, pages_next = pages_of(coming);
    const uint32_t arena_address = static_cast<uint32_t>(__cvta_generic_to_shared(arena));
    // Copies a unit row by row.
    const auto fetch_unit = [&](int part, char *unit) {
        const uint32_t target = static_cast<uint32_t>(__cvta_generic_to_shared(unit));
        const int first = coming.tile * Tiling::keys + part * tile::cached_rows;
        const auto copy = [&](const CachedArray &array, const PagedRows &from, auto keys) {
            const RowFormat format = array.format;
            if (array.tile_dim) {
                const char *tile =
                    from.code_strides.row(from.codes, problem.batch, problem.first_tile(Tiling::keys) + coming.tile);
                if (!keys && format != RowFormat::plain)
                    return Units::copy_columns(target, format, tile, part, array.tile_dim);
                const tile::TileRows rows(array.tile_dim * tile::bits_of(format) / 8, keys);
                const int first_row = part * tile::cached_rows;
                Units::copy_rows(target, format, keys, [&](int row, int chunk) {
                    return chunk < rows.chunks ? tile + 16 * rows.index(first_row + row, chunk) : nullptr;
                });
                if (format == RowFormat::plain) return;
                const int blocks = tile::blocks_of(format, array.tile_dim), step = ceil_div(blocks, 4) * 4;
                const char *scales = tile + 16 * Tiling::keys * rows.chunks + first_row * step;
                Units::copy_scales(unit, format, blocks, true, [&](int row) { return scales + row * step; });
                return;
            }
            const auto row_of = [&](const char *base, const PageStrides &strides, int row) -> const char * {
                if (first + row < first_key || first + row >= end_key) return nullptr;
                const PageTable::Place of_row = table.place(first + row);
                return strides.row(base, of_row.page, of_row.row);
            };
            Units::copy_rows(target, format, keys, [&](int row, int chunk) -> const char * {
                const char *from_row = chunk < from.chunks ? row_of(from.codes, from.code_strides, row) : nullptr;
                return from_row ? from_row + 16 * chunk : nullptr;
            });
            if (format != RowFormat::plain)
                Units::copy_scales(unit, format, from.scale_bytes, from.aligned,
                                   [&](int row) { return row_of(from.scales, from.scale_strides, row); });
        };
        if (coming.part < units) copy(cached.k, k_rows, std::true_type{});
        else copy(cached.v, v_rows, std::false_type{});
    };
    // Copies a batch of units, each within one page, from `first` on.
    const auto fetch_whole = [&](int part, int first, const RowFormat of, const PagedRows &from, auto keys) {
        tile::with_format<Element>(of, [&](auto format) {
#pragma unroll 1
            for (int i = 0; i < ring.batch; ++i) {
                const int page = tile::of_unit(pages_here, part + i), row = table.row_of(first + i * tile::cached_rows);
                const uint32_t unit = arena_address + filled + i * ring.unit_bytes;
                Units::copy_whole(
                    unit, keys, from.chunks, from.code_strides.token,
                    [&](int of_unit) { return from.code_strides.row(from.codes, page, row + of_unit); }, format);
                Units::copy_whole_scales(
                    unit, from.scale_bytes, from.scale_strides.token,
                    [&](int of_unit) { return from.scale_strides.row(from.scales, page, row + of_unit); }, format);
            }
        });
    };
    // Whether units of an array can be copied by fetch_whole().
    const auto copies_whole = [&](const CachedArray &array, const PagedRows &from) {
        return table.shift >= 0 && array.tile_dim == 0 && (array.format == RowFormat::plain || from.aligned);
    };
    const bool k_whole = copies_whole(cached.k, k_rows), v_whole = copies_whole(cached.v, v_rows);
    // Starts copying the next batch as one group of copies. Behind the last batch groups are empty, so that the count
    // of wait() stays right.
    const auto fetch = [&]() __attribute__((always_inline)) {   // a tile is a whole number of batches
        if (coming.there()) {
            const int part = coming.part % units, first = coming.tile * Tiling::keys + part * tile::cached_rows;
            if (coming.part == 0) {
                pages_here = pages_next;
                UnitCursor<units> after = coming;
                after.next_tile();
                pages_next = pages_of(after);
            }
            const bool keys = coming.part < units;
            if ((keys ? k_whole : v_whole) && first >= first_key && first + ring.batch * tile::cached_rows <= end_key) {
                if (keys) fetch_whole(part, first, cached.k.format, k_rows, std::true_type{});
                else fetch_whole(part, first, cached.v.format, v_rows, std::false_type{});
            } else {
#pragma unroll 1
                for (int i = 0; i < ring.batch; ++i) fetch_unit(part + i, arena + filled + i * ring.unit_bytes);
            }
            coming.advance(ring.batch);
            const int bytes = ring.batch * ring.unit_bytes;
            filled = filled + bytes == ring_end ? ring.begin : filled + bytes;
        }
        ptx::cp_async_commit_group();
    };
    // Fill the ring except for one batch.
#pragma unroll 1
    for (int i = 0; i < ring.batches - 1; ++i) fetch();

    // Q, in registers or in shared memory.
    tile::FragmentA all_q[dim / 16];
    tile::load_queries<Element, dim>(all_q, options.dim, [&](int row) {
        return first_row + row < end_row ? q + problem.at(q_strides, first_row + row) : nullptr;
    });
    if constexpr (!Tiling::keeps_q) {
#pragma unroll
        for (int step = 0; step < dim / 16; ++step)
#pragma unroll
            for (int i = 0; i < 4; ++i) tile::of_lane(shared.q[step])[i] = all_q[step][i];   // equal in all warps
        ptx::bar_sync();                                                                     // all threads see Q
    }
    const auto query = [&](int step) -> const tile::FragmentA & {
        if constexpr (Tiling::keeps_q) return all_q[step];
        else return tile::of_lane(shared.q[step]);
    };

    // Factors of scores and outputs, and the state of reading.
    const float scale = options.scale * tile::lift_of(cached.k.format) * (cached.q_global ? *cached.q_global : 1.0f) *
                        (cached.k_global ? cached.k_global[cached.levels == 1 ? 0 : problem.head] : 1.0f);
    const float factor = score_factor(problem, scale), value_lift = tile::lift_of(cached.v.format);
    const bool natural_columns = cached.v.format == RowFormat::plain || cached.v.has_columns();
    const int lane_queries[2] = {problem.query_of(first_row + tile::accumulator_row(0)),
                                 problem.query_of(first_row + tile::accumulator_row(2))};
    const uint32_t of_columns = tile::address_b(*reinterpret_cast<Columns *>(arena)) - arena_address;
    int read = ring.begin;   // offset of the unit that is read next

    // All nodes: the softmax over the warp's tiles, then the sum of the four warps.
    UnitCursor<units> here(first_node, end_node, first_tile, end_tile, warp);
#pragma unroll 1
    for (int node = first_node; node < end_node; ++node) {
        OnlineSoftmax<1, dim> softmax;
        softmax.start();
#pragma unroll 1
        for (; here.node == node; here.tile++, here.settle()) {
            const int tile_key = here.tile * Tiling::keys;
            const bool common = tile_key >= first_common && tile_key + Tiling::keys <= end_common;
            // Zero times a value that is not finite is NaN. So if rows see different keys, each query has a pass of its
            // own, with zeros in place of the values that it does not see. Tiles with columns need this even for a
            // single query, since they also hold keys that no query sees.
            const bool isolates = !common && (first_query != last_query || cached.v.has_columns());
            tile::Accumulator s[1][2 * units];   // scores, then weights as round_weights leaves them
#pragma unroll 1
            for (int part = 0; part < 2 * units; ++part) {
                if ((part & (ring.batch - 1)) == 0) {
                    ring.wait();
                    ptx::bar_warp_sync();   // all lanes see this batch and have read the one before
                    fetch();
                }
                const RowFormat format = part < units ? cached.k.format : cached.v.format;
                char *const unit = arena + read;
                read = read + ring.unit_bytes == ring_end ? ring.begin : read + ring.unit_bytes;
                if (part < units) {
                    // Keys: the scores of 16 keys. After the last of them, the softmax of the tile.
                    tile::Accumulator sum[2] = {};
                    tile::with_format<Element>(format, [&](auto of) { Units::multiply_keys(sum, unit, query, of); });
                    move_up<2>(s[0]);
                    tile::copy(s[0][2 * units - 2], sum[0]);
                    tile::copy(s[0][2 * units - 1], sum[1]);
                    if (part < units - 1) continue;
                    if (!common || problem.transforms_scores())
                        mask_scores<tile::NaturalKeys>(s, problem, first_row, tile_key, scale);
                    softmax.take(s, factor);
                    round_weights<Element>(s[0]);
                    continue;
                }
                // Values: o += P V, in one pass for all queries, or in a pass for each query with only its keys.
                const auto each_pass = [&](auto &&add) {
                    if (!isolates) return add(std::false_type{}, 0);
#pragma unroll 1
                    for (int query = first_query; query <= last_query; ++query) add(std::true_type{}, query);
                };
                const auto add_to = [&](tile::Accumulator &o, const tile::FragmentA &p, const tile::FragmentB &b,
                                        auto isolated, int query, int first) {
                    if constexpr (!isolated) {
                        tile::multiply(o, p, b, Element{});
                    } else {
                        const int begin = problem.first_visible(query) - first,
                                  end = problem.end_visible(query) - first;
                        const auto seen = tile::pair_masks([&](int key) { return key >= begin && key < end; });
                        const tile::FragmentB shown = {b[0] & seen.pair[0], b[1] & seen.pair[1]};
                        tile::Accumulator sum;
                        tile::copy(sum, o);
                        tile::multiply(sum, p, shown, Element{});
#pragma unroll
                        for (int i = 0; i < 4; ++i)
                            if (lane_queries[i / 2] == query) o[i] = sum[i];
                    }
                };
                if (!cached.v.has_columns()) {
                    // A unit of rows: 16 keys, all columns.
                    tile::FragmentA p;
                    weights_of(p, s[0][0]);
                    move_up<1>(s[0]);
                    each_pass([&](auto isolated, int query) {
                        tile::with_format<Element>(format, [&](auto of) {
                            const auto add = [&](int j, const tile::FragmentB &b) {
                                add_to(softmax.o[0][j], p, b, isolated, query,
                                       tile_key + (part - units) * tile::cached_rows);
                            };
                            Units::for_values(unit, add, of);
                        });
                    });
                } else {
                    // A unit of columns: a quarter of the columns, all keys of the tile.
                    char *const expanded = ring.in_place ? unit : arena;
                    ptx::bar_warp_sync();   // all lanes have read what was expanded before
                    tile::with_block_format<Element>(format, [&](auto block) {
                        Units::expand_columns(*reinterpret_cast<Columns *>(expanded), unit, part - units, block);
                    });
                    ptx::bar_warp_sync();   // all lanes see the expanded columns
                    const uint32_t columns_address =
                        static_cast<uint32_t>(__cvta_generic_to_shared(expanded)) + of_columns;
                    static_for<units>([&](auto quarter) {
                        if (part - units != quarter) return;
                        tile::Accumulator *o = softmax.o[0] + quarter * (columns / 4);
                        each_pass([&](auto isolated, int query) {
#pragma unroll
                            for (int step = 0; step < units; ++step) {
                                tile::FragmentA p;
                                weights_of(p, s[0][step]);
#pragma unroll
                                for (int pair = 0; pair < Units::quarter / 16; ++pair) {
                                    tile::FragmentB b[2];
                                    tile::load_b<Columns>(b, columns_address, 16 * pair, 2 * step);
#pragma unroll
                                    for (int half = 0; half < 2; ++half)
                                        add_to(o[2 * pair + half], p, b[half], isolated, query,
                                               tile_key + step * tile::cached_rows);
                                }
                            }
                        });
                    });
                }
            }
        }
        softmax.finish();
#pragma unroll
        for (int half = 0; half < 2; ++half)
            if (softmax.row_sum[0][half] == 0.0f) softmax.row_max[0][half] = -INFINITY;   // a row without keys

        // The node: chunks 0 + 1 and 2 + 3 of the four warps, then the sum of both.
        const auto node_of = [&](int warp) ->
            typename Tiling::Node & { return *reinterpret_cast<typename Tiling::Node *>(shared.arena[warp].bytes); };
        ptx::bar_warp_sync();   // all lanes have read what was expanded last
        const auto send = [&](typename Tiling::Node &to, int first) {
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
        const auto take = [&](typename Tiling::Node &from, int first) {
            const NodeSum sums[2] = {{softmax.row_max[0][0], from.row_max(0)},
                                     {softmax.row_max[0][1], from.row_max(1)}};
#pragma unroll
            for (int j = 0; j < Tiling::exchanged / 8; ++j) {
                const float4 right = from.accumulator(j);
                tile::Accumulator &o = softmax.o[0][first + j];
                o[0] = sums[0].add(o[0], right.x), o[1] = sums[0].add(o[1], right.y);
                o[2] = sums[1].add(o[2], right.z), o[3] = sums[1].add(o[3], right.w);
            }
            if (first + Tiling::exchanged / 8 < dim / 8) return;   // later columns need the old maxima
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
                if (warp % (2 * level) == level) send(node_of(warp), first);
                ptx::bar_sync();   // all threads see the right sides
                if (warp % (2 * level) == 0) take(node_of(warp + level), first);
                ptx::bar_sync();   // all threads have read them
            }
        // Warp 0 writes the node.
        if (warp != 0) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = first_row + tile::accumulator_row(2 * half);
            if (row >= end_row) continue;
            const size_t at =
                size_t(node) * options.batch * options.heads_kv * options.group * options.queries + problem.row_at(row);
            const float max = softmax.row_max[0][half];
            if (tile::accumulator_column(0) == 0) {
                options.row_max[at] = max;
                options.row_sum[at] = softmax.row_sum[0][half];
            }
            if (max == -INFINITY) continue;   // merging ignores the node, so its values need not be written
            float *target = options.partial + at * options.dim_v;
            if (natural_columns) {
#pragma unroll
                for (int j = 0; j < columns; ++j) {
                    const int column = j * tile::mma_columns + tile::accumulator_column(0);
                    if (column >= options.dim_v) continue;
                    const tile::Accumulator &o = softmax.o[0][j];
                    *reinterpret_cast<float2 *>(target + column) = {o[2 * half] * value_lift,
                                                                    o[2 * half + 1] * value_lift};
                }
            } else {   // a lane has two runs of columns; dim_v of block formats is a multiple of 4
#pragma unroll
                for (int i = 0; i < 2; ++i)
#pragma unroll
                    for (int j = 0; j < columns; j += 4) {
                        const int column = tile::accumulator_column(i) * columns + j, at = 2 * half + i;
                        if (column >= options.dim_v) continue;
                        const tile::Accumulator *o = softmax.o[0] + j;
                        *reinterpret_cast<float4 *>(target + column) = {o[0][at] * value_lift, o[1][at] * value_lift,
                                                                        o[2][at] * value_lift, o[3][at] * value_lift};
                    }
            }
        }
    }
}

}   // namespace op
