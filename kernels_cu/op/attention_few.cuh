// Attention of few queries. Keys and values stay in the format of the cache or operand and are expanded to 16 bits on
// their way into the MMAs.
//
// A block computes 16 rows of one head of K and V. Each of its four warps has chunks of the keys of its own and a ring
// of units in flight. The block adds four chunks to a node, which it writes. The result of a row depends only on the
// row and on the keys that it sees: see tree.cuh. Formats and places of keys are chosen at run time, once a batch, so
// any format of keys combines with any format of values. Units within one page are copied in whole rounds of the warp,
// others row by row.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../kernel.cuh"
#include "../ptx/access.cuh"
#include "../ptx/barrier.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/named_barrier.cuh"
#include "../ptx/target.cuh"
#include "../ptx/warp.cuh"
#include "../tile/cached_rows.cuh"
#include "../tile/fragment.cuh"
#include "../tile/lanes.cuh"
#include "attention.cuh"
#include "merge.cuh"
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

// A problem that divides by the group only if a sequence may have several queries.
struct FewProblem : Problem {
    using Problem::Problem;
    __device__ int query_of(int row) const { return queries == 1 ? 0 : Problem::query_of(row); }
    __device__ int group_of(int row) const { return queries == 1 ? row : Problem::group_of(row); }
    __device__ size_t at(const StridesQ &strides, int row) const {
        return Problem::at(strides, query_of(row), group_of(row));
    }
    __device__ size_t row_at(int row) const {
        return (size_t(batch * options.heads_kv + head) * options.group + group_of(row)) * options.queries +
               first_query + query_of(row);
    }
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

// What a block needs to write the outputs of rows that have one node.
struct FewEnding {
    bool wanted;                      // whether there are any
    float *merged_max, *merged_sum;   // as in Merged
    const float *v_global;            // [v_levels]: factors of the outputs, or null
    int v_levels;
};

// The number of keys that `table` pages hold, limited so that sums of key numbers fit 32 bits.
__device__ inline int capacity(int table, int page) {
    return min(static_cast<long long>(table) * page, 0x7fffffffll - node_keys);
}

// The node of a block's rows, for finish_rows.
template <int dim>
struct FinishedRows {
    alignas(16) float o[16][dim + 8];   // the padding saves bank conflicts
    float max[16], sum[16];
};

// How a block divides the work. A block has one warp for each quarter of a multiprocessor. With several blocks to a
// multiprocessor, a quarter computes for one while others wait for data. On GeForce Blackwell the rings of two blocks
// are just long enough for its bandwidth.
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
    using State = tile::WarpNode<dim>;
    using Finished = FinishedRows<dim>;
    static constexpr int spilled = dim <= 128 ? 96 : 800;   // bytes; the O of large heads leaves few registers
    static constexpr bool keeps_q = dim <= 64;              // in registers; else in shared memory

    // Shared memory of a warp: first room for an expanded unit of columns or for a node, then the ring.
    static constexpr int unit_bytes = sizeof(typename Units::Columns);
    static constexpr int expanded_bytes = unit_bytes > int(sizeof(Node)) ? unit_bytes : int(sizeof(Node));
    static constexpr int arena_bytes = tile::few_arena_bytes<dim>;

    // The units of rows that a warp copies, waits for and multiplies at once: as many as leave three such batches in
    // the ring, or two in a large one. O of larger heads leaves registers for one unit alone.
    static constexpr int batches = ptx::shared_bytes_per_block > 128 * 1024 ? 2 : 3;
    static constexpr int batch_bytes = (arena_bytes - int(sizeof(Node))) / batches;
    template <class Format>
    static constexpr int batch = dim > 128                                                ? 1
                                 : 4 * Units::template row_bytes<Format>() <= batch_bytes ? 4
                                 : 2 * Units::template row_bytes<Format>() <= batch_bytes ? 2
                                                                                          : 1;
    struct alignas(128) Arena {
        char bytes[arena_bytes];
    };
    struct Shared {
        Arena arena[warps];
        tile::FragmentA q[keeps_q ? 1 : dim / 16][32];
    };
    static_assert(sizeof(State) <= sizeof(Arena) && sizeof(Finished) <= sizeof(Arena), "they replace an empty ring");
    static_assert(sizeof(Node) % 128 == 0 && sizeof(Shared) <= ptx::shared_bytes_per_block, "the rings fit");
};

// A warp's ring. `begin` is its offset in the arena. A slot holds a batch of units, of keys or of values. in_place:
// columns of V are expanded in their slot, which has room for that if keys have 16 bits.
struct FewRing {
    int begin, slot_bytes, slots;
    int k_batch, v_batch;   // units of a batch
    bool in_place;

    template <class Tiling>
    __device__ static FewRing of(const CachedKeys &cached, Tiling) {
        using Units = typename Tiling::Units;
        FewRing ring;
        ring.in_place = cached.k.format == RowFormat::plain;
        ring.begin = ring.in_place || !cached.v.has_columns() ? sizeof(typename Tiling::Node) : Tiling::expanded_bytes;
        const auto batch_of = [](RowFormat format, int &bytes) {
            int units;
            tile::with_format<typename Tiling::Element>(format, [&](auto of) {
                units = Tiling::template batch<decltype(of)>;
                bytes = units * Units::template row_bytes<decltype(of)>();
            });
            return units;
        };
        int k_bytes, v_bytes;
        ring.k_batch = batch_of(cached.k.format, k_bytes), ring.v_batch = batch_of(cached.v.format, v_bytes);
        if (cached.v.has_columns()) {
            v_bytes = Units::column_bytes(cached.v.format);
            ring.v_batch = ring.in_place ? 1 : max(k_bytes / v_bytes, 1) >= 4 ? 4 : 2 * v_bytes <= k_bytes ? 2 : 1;
            v_bytes *= ring.v_batch;
        }
        ring.slot_bytes = max(k_bytes, v_bytes);
        const int room = Tiling::arena_bytes - ring.begin;   // divisions take as long as a copy
        ring.slots = room >= 4 * ring.slot_bytes ? 4 : room >= 3 * ring.slot_bytes ? 3 : 2;
        return ring;
    }

    // Waits until the oldest batch has landed, with `slots` - 1 behind it in flight.
    __device__ void wait() const {
        if (slots == 4) ptx::cp_async_wait_group<3>();
        else if (slots == 3) ptx::cp_async_wait_group<2>();
        else ptx::cp_async_wait_group<1>();
    }
};

// The tiles of a warp in order, node by node. A tile has 2 `units` units: first its keys, then its values. A warp has
// the tiles of a chunk of each node, or if there is a single chunk to share, one of its tiles.
template <int units>
struct UnitCursor {
    static constexpr int chunk_tiles = chunk_keys / (units * tile::cached_rows);
    static_assert(chunk_tiles == node_chunks, "each warp gets a tile of a shared chunk");
    int node, end_node, step, first_tile, end_tile, warp;   // step: from node to node
    bool shares;
    int tile, tiles_end, part;   // tile; end of the warp's tiles of the node; unit of the tile

    __device__ UnitCursor(int first_node, int end_node, int step, int first_tile, int end_tile, int warp, bool shares)
        : node(first_node - step), end_node(end_node), step(step), first_tile(first_tile), end_tile(end_tile),
          warp(warp), shares(shares), part(0) {
        next_node();
        settle();
    }
    __device__ void next_node() {
        node += step;
        const int first = node * node_chunks * chunk_tiles + (shares ? 1 : chunk_tiles) * warp;
        tile = max(first, first_tile);
        tiles_end = min(first + (shares ? 1 : chunk_tiles), end_tile);
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

// s[j] = s[j + by]. Rolled loops over batches then use the same registers, the first or the last ones, in every
// iteration.
template <int by, int count, class Fragment>
__device__ inline void move_up(Fragment (&s)[count]) {
#pragma unroll
    for (int j = 0; j + by < count; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[j][i] = s[j + by][i];
}

// s[j] = s[(j + 1) % count].
template <int count, class Fragment>
__device__ inline void rotate(Fragment (&s)[count]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const auto first = s[0][i];
#pragma unroll
        for (int j = 0; j + 1 < count; ++j) s[j][i] = s[j + 1][i];
        s[count - 1][i] = first;
    }
}

// Hides the keys of the tile that starts at `first_key` from the rows g + 8 half if their query does not see them.
template <int half, int tiles>
__device__ inline void hide_keys(tile::Accumulator (&s)[1][tiles], const Problem &problem, int query, int first_key) {
    using Keys = tile::NaturalKeys;
    const int lane_key = first_key + Keys::key(0, tile::accumulator_column(0));
    const int begin = problem.first_visible(query) - lane_key, end = problem.end_visible(query) - lane_key;
#pragma unroll
    for (int j = 0; j < tiles; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float &score = s[0][j][2 * half + i];
            score = Keys::key(j, i) < end ? score : -INFINITY;
        }
    if (problem.options.left >= problem.keys) return;   // no window
#pragma unroll
    for (int j = 0; j < tiles; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float &score = s[0][j][2 * half + i];
            score = Keys::key(j, i) >= begin ? score : -INFINITY;
        }
}

// What softmax.take(s, factor) does, for the rows g + 8 half alone.
template <int half, class Softmax, int tiles>
__device__ __forceinline__ void take_half(Softmax &softmax, tile::Accumulator (&s)[1][tiles], float factor) {
    float &max = softmax.row_max[0][half], &sum = softmax.row_sum[0][half];
    float most = fmaxf(s[0][0][2 * half], s[0][0][2 * half + 1]);
#pragma unroll
    for (int j = 1; j < tiles; ++j) most = fmaxf(most, fmaxf(s[0][j][2 * half], s[0][j][2 * half + 1]));
    most *= factor;
    if (ptx::vote_sync_any(most > max + softmax.headroom)) {
        most = tile::reduce_row(most, [](float a, float b) { return fmaxf(a, b); });
        most = most > max + softmax.headroom ? Softmax::whole(most) : max;
        const float under_new = Softmax::rescale(max, most);
        max = most;
        sum *= under_new;
#pragma unroll
        for (auto &values : softmax.o[0]) values[2 * half] *= under_new, values[2 * half + 1] *= under_new;
    }
    const Exponents exponents(max);
#pragma unroll
    for (auto &scores : s[0])
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
            scores[i] = exponents.weight(scores[i], factor);
            sum += scores[i];
        }
}

// Writes the outputs of rows first_row .. end_row - 1 of a problem with one node. Eight threads have a row. dim_v is a
// multiple of merge_columns.
template <int dim>
__device__ inline void finish_rows(const FewProblem &problem, const FinishedRows<dim> &rows, int first_row, int end_row,
                                   const FewEnding &ending) {
    constexpr int row_threads = 8;
    const AttentionOptions &options = problem.options;
    const int in_block = threadIdx.x / row_threads, row = first_row + in_block;
    if (row >= end_row) return;
    const size_t at = problem.row_at(row);
    const auto of_row = [&](auto *values) { return values ? values + at : nullptr; };
    const RowEnding of{options.sinks ? options.sinks + problem.head * options.group + problem.group_of(row) : nullptr,
                       options.softcap > 0.0f ? nullptr : of_row(options.row_shift),   // under a cap, scores contain it
                       ending.v_global ? ending.v_global + (ending.v_levels > 1 ? problem.head : 0) : nullptr,
                       of_row(options.lse),
                       of_row(ending.merged_max),
                       of_row(ending.merged_sum)};
    const float max = rows.max[in_block], sum = rows.sum[in_block];
#pragma unroll 1
    for (int column = threadIdx.x % row_threads * merge_columns; column < options.dim_v;
         column += row_threads * merge_columns) {
        float4 part{};
        if (max != -INFINITY) {
            part = *reinterpret_cast<const float4 *>(rows.o[in_block] + column);
            *reinterpret_cast<float4 *>(options.partial + at * options.dim_v + column) = part;
        }
        if (column == 0) options.row_max[at] = max, options.row_sum[at] = sum;
        const Piece<merge_columns> node{max, {part.x, part.y, part.z, part.w, sum, sum}};
        finish_piece(of, node, false, 0.0f, column == 0, [&](const float (&values)[merge_columns]) {
            const auto store = [&](auto *out, const StridesQ &strides) {
                if (!out) return;
                using Output = std::remove_pointer_t<decltype(out)>;
                struct alignas(merge_columns * sizeof(Output)) {
                    Output element[merge_columns];
                } packed;
#pragma unroll
                for (int i = 0; i < merge_columns; ++i) packed.element[i] = Output(values[i]);
                *reinterpret_cast<decltype(packed) *>(out + problem.at(strides, row) + column) = packed;
            };
            store(options.out_bf16, options.out_bf16_strides);
            store(options.out_f16, options.out_f16_strides);
            store(options.out_f32, options.out_f32_strides);
        });
    }
}

// Attention of the 16 rows of a block for one split of the nodes. Nodes are undivided sums and go to partial, row_max
// and row_sum of the options, as splits do. A single node becomes the outputs of `ending`.
template <class Tiling, class Element>
__device__ __forceinline__ void attention_few(typename Tiling::Shared &shared, const Element *q,
                                              const StridesQ &q_strides, const CachedKeys &cached,
                                              const AttentionOptions &options, const FewEnding &ending) {
    using Units = typename Tiling::Units;
    using Columns = typename Units::Columns;
    constexpr int dim = Tiling::dim, units = Tiling::units, columns = dim / tile::mma_columns;
    // The rows of this block.
    const FewProblem problem(options, uint3(blockIdx));
    const int first_row = problem.row_block * Tiling::rows;
    if (first_row >= problem.rows) return;   // packed sequences have different lengths
    const int end_row = min(first_row + Tiling::rows, problem.rows), warp = threadIdx.x / 32;
    const int first_query = problem.query_of(first_row), last_query = problem.query_of(end_row - 1);

    // The keys that any row sees, and the keys that all rows see.
    const int first_key = problem.first_visible(first_query), end_key = max(problem.end_visible(last_query), first_key);
    const int first_common = problem.first_visible(last_query), end_common = problem.end_visible(first_query);
    const int end_tile = ceil_div(end_key, Tiling::keys);
    const int first_tile = end_key > first_key ? first_key / Tiling::keys : end_tile;

    // The nodes of this split: every `splits`-th, so that all splits have work if there are fewer keys than nodes for.
    const int first_node = problem.split, end_node = cached.nodes, node_step = options.splits;

    // Where rows of keys and values are in memory.
    const PageTable table = cached.block_table ? PageTable(cached.block_table + blockIdx.z * cached.table_stride,
                                                           cached.page, tile::cached_rows)
                                               : PageTable(problem.batch, problem.first_key);
    const auto rows_of = [&](const CachedArray &array, int dim) {
        return PagedRows(array.codes, array.strides, array.scales, array.scale_strides, problem.head,
                         dim * tile::bits_of(array.format) / 8, tile::blocks_of(array.format, dim));
    };
    const PagedRows k_rows = rows_of(cached.k, options.dim), v_rows = rows_of(cached.v, options.dim_v);
    const auto is_packed = [&](const CachedArray &array, const PagedRows &rows) {
        return array.tile_dim == 0 && Units::packable_rows(array.format) && rows.has_packed_scales(2) &&
               table.first % 2 == 0;
    };
    const bool k_packed = is_packed(cached.k, k_rows), v_packed = is_packed(cached.v, v_rows);

    // The ring, and the cursor of the copies.
    char *const arena = shared.arena[warp].bytes;
    const FewRing ring = FewRing::of(cached, Tiling{});
    const int ring_end = ring.begin + ring.slots * ring.slot_bytes;
    // The warps share a single chunk, one tile each. The state of the softmax then goes from warp to warp.
    const bool shares = end_tile <= UnitCursor<units>::chunk_tiles && end_tile - first_tile > 1;
    UnitCursor<units> coming(first_node, end_node, node_step, first_tile, end_tile, warp, shares);
    int filled = ring.begin;   // offset of the next slot
    // The pages of the units of this warp's chunk of a node: lanes i and i + 16 hold that of unit i. They are loaded
    // one node ahead.
    constexpr int chunk_units = chunk_keys / tile::cached_rows;
    const auto pages_of = [&](int node) {
        if (table.shift < 0 || node >= end_node) return 0;
        const int unit = (node * node_chunks + (shares ? 0 : warp)) * chunk_units + tile::lane_unit<chunk_units>();
        return table.page_of(max(min(unit * tile::cached_rows, end_key - 1), first_key));
    };
    int pages_next = pages_of(coming.node), found = -1;   // found: the node of the next addresses
    // The addresses of these units: lanes i have those of keys, lanes i + 16 those of values.
    const char *codes_here = nullptr, *scales_here = nullptr;
    const auto find_units = [&](int chunk) {
        const bool keys = tile::lane_group<chunk_units>() == 0;
        const PagedRows rows = keys ? k_rows : v_rows;
        const int row = table.row_of((chunk * chunk_units + tile::lane_unit<chunk_units>()) * tile::cached_rows);
        codes_here = rows.code_strides.row(rows.codes, pages_next, row);
        scales_here = rows.scale_strides.row(rows.scales, pages_next, row);
    };
    const uint32_t arena_address = static_cast<uint32_t>(__cvta_generic_to_shared(arena));
    // Copies a unit row by row.
    const auto fetch_unit = [&](int part, char *unit) {
        const uint32_t target = static_cast<uint32_t>(__cvta_generic_to_shared(unit));
        const int first = coming.tile * Tiling::keys + part * tile::cached_rows;
        const bool keys = coming.part < units;
        const CachedArray array = keys ? cached.k : cached.v;   // copies: references would put both in local memory
        const PagedRows from = keys ? k_rows : v_rows;
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
            Units::copy_scales(unit, format, blocks, true, false, [&](int row) { return scales + row * step; });
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
            Units::copy_scales(unit, format, from.scale_bytes, from.aligned, keys ? k_packed : v_packed,
                               [&](int row) { return row_of(from.scales, from.scale_strides, row); });
    };
    // Copies a batch of units, each within one page, from key `first` on. Keys that no row sees become zeros.
    const auto fetch_whole = [&](bool keys, int unit, int first) {
        const PagedRows from = keys ? k_rows : v_rows;
        const typename Units::WholeRows codes{static_cast<unsigned>(from.code_strides.token), from.chunks},
            scales{static_cast<unsigned>(from.scale_strides.token), from.scale_bytes};
        unit += keys ? 0 : chunk_units;
        tile::with_format<Element>(keys ? cached.k.format : cached.v.format, [&](auto format) {
            using Format = decltype(format);
            Units::template copy_whole<Format, Tiling::template batch<Format>>(
                arena_address + filled, keys, first_key - first, end_key - first, codes, scales,
                keys ? k_packed : v_packed, [&](int i) { return tile::of_unit(codes_here, unit + i); },
                [&](int i) { return tile::of_unit(scales_here, unit + i); });
        });
    };
    // Whether units of an array can be copied by fetch_whole().
    const auto copies_whole = [&](const CachedArray &array, const PagedRows &from, bool packed) {
        return table.shift >= 0 && array.tile_dim == 0 && (array.format == RowFormat::plain || from.aligned || packed);
    };
    const bool k_whole = copies_whole(cached.k, k_rows, k_packed), v_whole = copies_whole(cached.v, v_rows, v_packed);
    // Starts copying the next batch as one group of copies. Behind the last batch groups are empty, so that the count
    // of wait() stays right.
    const auto fetch = [&]() __attribute__((always_inline)) {   // a tile is a whole number of batches
        if (coming.there()) {
            const int part = coming.part % units, first = coming.tile * Tiling::keys + part * tile::cached_rows;
            if (found != coming.node) {
                found = coming.node;
                find_units(found * node_chunks + (shares ? 0 : warp));
                pages_next = pages_of(found + node_step);
            }
            const bool keys = coming.part < units;
            const int batch = keys ? ring.k_batch : ring.v_batch;
            // Packed scales of two rows are copied at once, so both rows must be keys that rows of Q see.
            const bool all_shown = first >= first_key && first + batch * tile::cached_rows <= end_key;
            if ((keys ? k_whole : v_whole) && (all_shown || !(keys ? k_packed : v_packed))) {
                fetch_whole(keys, coming.tile * units % chunk_units + part, first);
            } else {
                const CachedArray array =
                    keys ? cached.k : cached.v;   // copies: references would put both in local memory
                const int bytes =
                    !keys && array.has_columns() ? Units::column_bytes(array.format) : Units::bytes(array.format);
#pragma unroll 1
                for (int i = 0; i < batch; ++i) fetch_unit(part + i, arena + filled + i * bytes);
            }
            coming.advance(batch);
            filled = filled + ring.slot_bytes == ring_end ? ring.begin : filled + ring.slot_bytes;
        }
        ptx::cp_async_commit_group();
    };
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
    int read = ring.begin;    // offset of the slot that is read next
    int empty = ring.slots;   // slots to fill: at first all, then the one that was read last

    // Fills the ring, and waits for its oldest slot.
    const auto next_slot = [&]() __attribute__((always_inline)) {
        ptx::bar_warp_sync();   // all lanes have read the batch before
#pragma unroll 1
        for (; empty > 0; --empty) fetch();
        empty = 1;
        ring.wait();
        ptx::bar_warp_sync();   // all lanes see this batch
        char *const slot = arena + read;
        read = read + ring.slot_bytes == ring_end ? ring.begin : read + ring.slot_bytes;
        return slot;
    };

    // Who writes nodes, and where a node is for its outputs.
    const int writer = shares ? end_tile - 1 : 0;
    const bool finishes = ending.wanted && cached.nodes == 1;
    typename Tiling::Finished &finished = *reinterpret_cast<typename Tiling::Finished *>(shared.arena[writer].bytes);

    // All nodes: the softmax over the warp's tiles, then the sum of the four warps.
    UnitCursor<units> here = coming;
#pragma unroll 1
    for (int node = first_node; node < end_node; node += node_step) {
        OnlineSoftmax<1, dim> softmax;
        softmax.start();
        // Stores columns of O from column tile `first` on, and maxima and sums.
        const auto send = [&](auto &to, int first) {
#pragma unroll
            for (int j = 0; j < std::remove_reference_t<decltype(to)>::tiles; ++j) {
                const tile::Accumulator &o = softmax.o[0][first + j];
                to.accumulator(j) = {o[0], o[1], o[2], o[3]};
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                to.row_max(half) = softmax.row_max[0][half];
                to.row_sum(half) = softmax.row_sum[0][half];
            }
        };
        // The state of the softmax after a tile of a shared chunk, which the warp of the next tile continues. Each pair
        // of neighbors has a barrier of its own, so that no other warp waits.
        const auto state_of = [&](int tile) ->
            typename Tiling::State & { return *reinterpret_cast<typename Tiling::State *>(shared.arena[tile].bytes); };
        const auto continue_after = [&](int tile) {
            ptx::bar_sync(1 + tile, 2 * 32);   // this warp sees that state
            typename Tiling::State &from = state_of(tile);
#pragma unroll
            for (int j = 0; j < columns; ++j) {
                const float4 four = from.accumulator(j);
                tile::Accumulator &o = softmax.o[0][j];
                o[0] = four.x, o[1] = four.y, o[2] = four.z, o[3] = four.w;
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                softmax.row_max[0][half] = from.row_max(half);
                softmax.row_sum[0][half] = from.row_sum(half);
            }
        };
#pragma unroll 1
        for (; here.node == node; here.tile++, here.settle()) {
            const int tile_key = here.tile * Tiling::keys;
            const bool common = tile_key >= first_common && tile_key + Tiling::keys <= end_common;
            // Zero times a value that is not finite is NaN. So if rows see different keys, each query has a pass of its
            // own, with zeros in place of the values that it does not see. Tiles with columns need this even for a
            // single query, since they also hold keys that no query sees.
            const bool isolates = !common && (first_query != last_query || cached.v.has_columns());
            // A batch of keys at a time gives the scores of the tile, which become weights, and then a batch of values
            // at a time joins the sums. Both wait for their slot in the same place, since its code is long.
            tile::Accumulator s[1][2 * units];
            tile::FragmentA p[units];
            int batch;
#pragma unroll 1
            for (int step = 0; step < 2 * units; step += batch) {
                char *const slot = next_slot();
                batch = step < units ? ring.k_batch : ring.v_batch;
                if (step < units) {
                    tile::with_format<Element>(cached.k.format, [&](auto of) {
                        constexpr int groups = 2 * Tiling::template batch<decltype(of)>;
                        constexpr int at_once = dim > 128 ? 1 : groups;
                        move_up<groups>(s[0]);
#pragma unroll
                        for (int group = 0; group < groups; group += at_once) {
                            tile::Accumulator sums[at_once] = {};
                            Units::multiply_keys(sums, slot, group, k_packed, query, of);
#pragma unroll
                            for (int j = 0; j < at_once; ++j) tile::copy(s[0][2 * units - groups + group + j], sums[j]);
                        }
                    });
                    if (step + batch < units) continue;
                    if (shares && here.tile > first_tile) continue_after(here.tile - 1);
                    if (problem.transforms_scores())
                        transform_scores<tile::NaturalKeys, true>(
                            s, problem,
                            [&](int, int half) {
                                return min(first_row + tile::accumulator_row(2 * half), problem.rows - 1);
                            },
                            tile_key, scale);
                    static_for<2>([&](auto half) {
                        if (half == 1 && end_row - first_row <= 8) return;   // without such rows
                        if (!common) hide_keys<half>(s, problem, lane_queries[half], tile_key);
                        take_half<half>(softmax, s, factor);
                    });
#pragma unroll
                    for (int i = 0; i < units; ++i)
                        tile::accumulators_to_a(p[i], s[0][2 * i], s[0][2 * i + 1], Element{});
                    continue;
                }
                // o += P V, in one pass for all queries, or in a pass for each query with only its keys.
                const int part = step - units;
                const auto add_shown = [&](tile::Accumulator &o, const tile::FragmentA &p, const tile::FragmentB &b,
                                           int query, int first) {
                    const int begin = problem.first_visible(query) - first, end = problem.end_visible(query) - first;
                    const auto seen = tile::pair_masks([&](int key) { return key >= begin && key < end; });
                    tile::Accumulator sum;
                    tile::copy(sum, o);
                    tile::multiply(sum, p, tile::FragmentB{b[0] & seen.pair[0], b[1] & seen.pair[1]}, Element{});
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        if (lane_queries[i / 2] == query) o[i] = sum[i];
                };
                if (!cached.v.has_columns()) {
                    // Units of rows: 16 keys, all columns.
                    tile::with_format<Element>(cached.v.format, [&](auto of) {
                        constexpr int batch = Tiling::template batch<decltype(of)>;
                        constexpr int bytes = Units::template row_bytes<decltype(of)>();
                        if (!isolates) {
                            const int end = ptx::of_this_branch(batch);   // else the first iteration stands apart
#pragma unroll 1
                            for (int i = 0; i < end; ++i) {
                                Units::for_values(
                                    slot + i * bytes, v_packed,
                                    [&](int j, const tile::FragmentB &b) {
                                        tile::multiply(softmax.o[0][j], p[0], b, Element{});
                                    },
                                    of);
                                rotate(p);
                            }
                            return;
                        }
#pragma unroll 1
                        for (int i = 0; i < batch; ++i) {
#pragma unroll 1
                            for (int query = first_query; query <= last_query; ++query) {
                                ptx::bar_warp_sync();   // values expanded before this loop would occupy registers
                                Units::for_values(
                                    slot + i * bytes, v_packed,
                                    [&](int j, const tile::FragmentB &b) {
                                        add_shown(softmax.o[0][j], p[0], b, query,
                                                  tile_key + (part + i) * tile::cached_rows);
                                    },
                                    of);
                            }
                            move_up<1>(p);
                        }
                    });
                } else {
                    // Units of columns: a quarter of the columns, all keys of the tile.
                    const int bytes = Units::column_bytes(cached.v.format);
#pragma unroll 1
                    for (int i = 0; i < ring.v_batch; ++i) {
                        char *const unit = slot + i * bytes, *const expanded = ring.in_place ? unit : arena;
                        ptx::bar_warp_sync();   // all lanes have read what was expanded before
                        tile::with_block_format<Element>(cached.v.format, [&](auto block) {
                            Units::expand_columns(*reinterpret_cast<Columns *>(expanded), unit, part + i, block);
                        });
                        ptx::bar_warp_sync();   // all lanes see the expanded columns
                        const uint32_t columns_address =
                            static_cast<uint32_t>(__cvta_generic_to_shared(expanded)) + of_columns;
                        static_for<units>([&](auto quarter) {
                            if (part + i != quarter) return;
                            tile::Accumulator *o = softmax.o[0] + quarter * (columns / 4);
                            const auto add = [&](auto &&add_to) {
#pragma unroll
                                for (int step = 0; step < units; ++step) {
#pragma unroll
                                    for (int pair = 0; pair < Units::quarter / 16; ++pair) {
                                        tile::FragmentB b[2];
                                        tile::load_b<Columns>(b, columns_address, 16 * pair, 2 * step);
#pragma unroll
                                        for (int half = 0; half < 2; ++half)
                                            add_to(o[2 * pair + half], p[step], b[half], step);
                                    }
                                }
                            };
                            if (!isolates) {
                                add([](tile::Accumulator &o, const tile::FragmentA &p, const tile::FragmentB &b, int) {
                                    tile::multiply(o, p, b, Element{});
                                });
                                return;
                            }
#pragma unroll 1
                            for (int query = first_query; query <= last_query; ++query) {
                                ptx::bar_warp_sync();
                                add([&](tile::Accumulator &o, const tile::FragmentA &p, const tile::FragmentB &b,
                                        int step) { add_shown(o, p, b, query, tile_key + step * tile::cached_rows); });
                            }
                        });
                    }
                }
            }
        }
        ptx::bar_warp_sync();   // all lanes have read what was copied or expanded last
        if (shares && node == 0 && warp >= first_tile && warp < end_tile - 1) {
            send(state_of(warp), 0);
            ptx::bar_sync(1 + warp, 2 * 32);   // the next warp sees it
        }
        softmax.finish();
#pragma unroll
        for (int half = 0; half < 2; ++half)
            if (softmax.row_sum[0][half] == 0.0f) softmax.row_max[0][half] = -INFINITY;   // a row without keys

        // The node: chunks 0 + 1 and 2 + 3 of the four warps, then the sum of both.
        const auto node_of = [&](int warp) ->
            typename Tiling::Node & { return *reinterpret_cast<typename Tiling::Node *>(shared.arena[warp].bytes); };
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
        for (int level = 1; level < Tiling::warps; level *= 2) {
            // Right sides behind the last key add nothing.
            if ((node * node_chunks + level) * (chunk_units / units) >= end_tile) continue;
#pragma unroll
            for (int first = 0; first < dim / 8; first += Tiling::exchanged / 8) {
                if (warp % (2 * level) == level) send(node_of(warp), first);
                ptx::bar_sync();   // all threads see the right sides
                if (warp % (2 * level) == 0) take(node_of(warp + level), first);
                ptx::bar_sync();   // all threads have read them
            }
        }
        // The warp that has the sum of all chunks writes the node, for finish_rows into its ring, which is empty then.
        if (warp != writer) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int in_block = tile::accumulator_row(2 * half), row = first_row + in_block;
            if (row >= end_row) continue;
            const size_t at =
                size_t(node) * options.batch * options.heads_kv * options.group * options.queries + problem.row_at(row);
            const float max = softmax.row_max[0][half];
            if (tile::accumulator_column(0) == 0) {
                *(finishes ? finished.max + in_block : options.row_max + at) = max;
                *(finishes ? finished.sum + in_block : options.row_sum + at) = softmax.row_sum[0][half];
            }
            if (max == -INFINITY) continue;   // merging ignores the node, so its values need not be written
            // One code stores to both memories.
            float *const target =
                ptx::of_this_branch(finishes ? finished.o[in_block] : options.partial + at * options.dim_v);
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
    if (!finishes) return;
    ptx::bar_sync();   // all threads see the node
    finish_rows(problem, finished, first_row, end_row, ending);
}

}   // namespace op
