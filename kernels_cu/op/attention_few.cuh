// Attention of few queries. Keys and values stay in the format of the cache or operand and are expanded to 16 bits on
// their way into the MMAs.
//
// A block computes 8 or 16 rows of one head of K and V. In the second product the rows of Q are on the side of the MMA
// that is 8 wide, so that a warp with 8 rows needs few registers. Each of its four warps has chunks of the keys of its
// own and a ring of units in flight. The block adds four chunks to a node, which it writes. The result
// of a row depends only on the row and on the keys that it sees: see tree.cuh. Formats and places of keys are chosen at
// run time, once a batch, so any format of keys combines with any format of values; KnownKeys has them in the code.
// Units within one page are copied in whole rounds of the warp, others row by row.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../kernel.cuh"
#include "../ptx/access.cuh"
#include "../ptx/access_no_value.cuh"
#include "../ptx/atom.cuh"
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
    int node_keys;                      // op::node_keys; of known keys also chunk_keys: each block then has one chunk
    const float *q_global, *k_global;   // [1] and [levels], or null: factors of codes times scales
    int levels;                         // 1, or the number of heads
};

// What a block needs to write the outputs of rows of which it has all nodes.
struct FewEnding {
    bool wanted;                      // whether there are any
    uint32_t *arrivals;               // [batch, heads_kv, group, queries]: zeros between launches, or null
    float *merged_max, *merged_sum;   // as in Merged
    const float *v_global;            // [v_levels]: factors of the outputs, or null
    int v_levels;
};

// The number of keys that `table` pages hold, limited so that sums of key numbers fit 32 bits.
__device__ inline int capacity(int table, int page) {
    return min(static_cast<long long>(table) * page, 0x7fffffffll - node_keys);
}

// The node of a block's rows, for finish_rows.
template <int dim, int rows>
struct FinishedRows {
    alignas(16) float o[rows][dim + 8];   // the padding saves bank conflicts
    float max[rows], sum[rows];
};

// Keys or values of a head, as the copies of a block take them.
struct FewSource {
    PagedRows rows;
    RowFormat format;
    int tile_dim, batch;   // batch: units
    // Whether scales are packed, whether whole units can be copied by fetch_whole(), whether units are columns, and
    // whether scales are aligned.
    bool packed, whole, columns, aligned;
};

// What is known of keys and values when the code is compiled: nothing, or that all are rows of one format without
// padding, that a sequence has one query, and that scores need only a factor. The code for known keys is short and has
// the instructions of a tile together. Caches of instructions hold it, and it takes few registers.
struct AnyKeys {
    static constexpr bool known = false, narrow = false;   // narrow: whether values have less than 16 bits
    static constexpr bool may_be(RowFormat) { return true; }
};
template <class Element, RowFormat format_>
struct KnownKeys {
    static constexpr RowFormat format = format_;
    static constexpr bool known = true, narrow = format != RowFormat::plain;
    static constexpr bool may_be(RowFormat other) { return format == other; }
    using Format = std::conditional_t<
        format == RowFormat::plain, tile::CachedPlain,
        std::conditional_t<format == RowFormat::nvfp4, tile::CachedNvfp4<Element>,
                           std::conditional_t<format == RowFormat::mxfp4, tile::CachedMxfp4, tile::CachedMxfp8>>>;
};

// How a block divides the work. A block has one warp for each quarter of a multiprocessor. With several blocks to a
// multiprocessor, a quarter computes for one while others wait for data. On GeForce Blackwell the rings of two blocks
// are just long enough for its bandwidth.
template <class Element_, int dim_, int rows_, class Keys_ = AnyKeys>
struct FewTiling {
    using Keys = Keys_;
    using Element = Element_;
    using Units = tile::CachedUnits<Element, dim_>;
    static constexpr int dim = dim_, rows = rows_, octets = rows / 8;   // of rows: 1 or 2
    static constexpr int warps = node_chunks, threads = 32 * warps;
    static constexpr bool exchanges_all =
        dim <= 128 && tile::few_blocks<Keys::narrow> == 4 && !Keys::may_be(RowFormat::mxfp8);
    static constexpr int keys = tile::tile_keys, units = keys / tile::cached_rows;   // of a tile
    // The columns of a node that warps exchange at once: all if there is room.
    static constexpr int exchanged = exchanges_all ? dim : (dim <= 128 ? 64 : 128) / octets;
    static constexpr int blocks = dim > 128 ? 1 : tile::few_blocks<Keys::narrow>;   // of a multiprocessor
    using Node = tile::WarpNode<exchanged, octets>;
    using State = tile::WarpNode<dim, octets>;
    using Finished = FinishedRows<dim, rows>;
    static constexpr bool keeps_q = dim <= 64;   // in registers; else in shared memory
    // Eight rows are B of the first product, and its sums are turned where a node is; 16 rows are A.
    static constexpr bool turns_scores = octets == 1;
    // Whether the copy into the place of the last keys of a tile begins before their scores become weights.
    static constexpr bool weights_late = Keys::known;
    using Query = std::conditional_t<turns_scores, tile::FragmentB, tile::FragmentA>;
    // For keys in CachedMxfp8Half, Q is there in f16, too.
    static constexpr bool has_halves =
        tile::is_bf16<Element> && dim == 128 && turns_scores && Keys::may_be(RowFormat::mxfp8);
    // Whether the scores of a tile are in registers; else where a node is. A local variable of a thread would wait for
    // all copies.
    static constexpr bool keeps_scores = dim <= 128 || turns_scores;
    static constexpr int spilled = dim > 128 && octets > 1 ? 1472 : 0;   // bytes; O takes most registers

    // Shared memory of a warp: first room for an expanded unit of columns or for a node, then the ring.
    static constexpr int unit_bytes = sizeof(typename Units::Columns);
    static constexpr int expanded_bytes = unit_bytes > int(sizeof(Node)) ? unit_bytes : int(sizeof(Node));
    static constexpr int arena_bytes = tile::few_arena_bytes<dim, blocks, has_halves>;

    // The units of rows that a warp copies, waits for and multiplies at once: as many as leave three such batches in
    // the ring, or two in a large one. O of larger heads leaves registers for one unit alone.
    static constexpr int batches = ptx::shared_bytes_per_block > 128 * 1024 ? 2 : 3;
    static constexpr int batch_bytes = (arena_bytes - int(sizeof(Node))) / batches;
    template <class Format>
    static constexpr int batch = dim > 128                                                ? 1
                                 : 4 * Units::template row_bytes<Format>() <= batch_bytes ? 4
                                 : 2 * Units::template row_bytes<Format>() <= batch_bytes ? 2
                                                                                          : 1;
    // Whether a batch of known keys or values is that of a tile.
    template <class Known>
    static constexpr bool takes_tiles = [] {
        if constexpr (Known::known) return batch<typename Known::Format> == units;
        else return false;
    }();
    struct alignas(128) Arena {
        char bytes[arena_bytes];
    };
    struct Shared {
        Arena arena[warps];
        Query q[has_halves ? 2 : 1][keeps_q ? 1 : dim / 16][32];
    };
    static_assert(!turns_scores || sizeof(tile::TurnedScores) <= sizeof(Node), "they replace a node");
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
    static constexpr int of_tile = 2 * units;               // units
    int node, end_node, step, first_tile, end_tile, warp;   // step: from node to node
    int node_tiles;
    bool shares;
    unsigned at, end;   // units of all tiles before this one; the end of the warp's units of the node

    __device__ UnitCursor(int first_node, int end_node, int step, int first_tile, int end_tile, int warp,
                          int node_tiles, bool shares)
        : node(first_node - step), end_node(end_node), step(step), first_tile(first_tile), end_tile(end_tile),
          warp(warp), node_tiles(node_tiles), shares(shares) {
        next_node();
        settle();
    }
    __device__ void next_node() {
        node += step;
        const int first = node * node_tiles + (shares ? 1 : chunk_tiles) * warp;
        at = of_tile * max(first, first_tile);
        end = of_tile * min(first + (shares ? 1 : chunk_tiles), end_tile);
    }
    // Moves on to the next node in which this warp has a tile, unless it is at a tile.
    __device__ void settle() {
        while (at >= end && node < end_node) next_node();
    }
    __device__ bool there() const { return node < end_node; }
    __device__ int tile() const { return at / of_tile; }
    __device__ int part() const { return at % of_tile; }   // unit of the tile
    __device__ bool has_keys() const { return (at & units) == 0; }
    __device__ void advance(int by) {
        at += by;
        settle();
    }
};

// s[j] = s[j + by]. Rolled loops over batches then use the same registers, the first or the last ones, in every
// iteration.
template <int by, int count, class Value>
__device__ inline void move_up(Value (&s)[count][2]) {
#pragma unroll
    for (int j = 0; j + by < count; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) s[j][i] = s[j + by][i];
}

// s[j] = s[(j + by) % count].
template <int by, int count, class Value, int width>
__device__ inline void rotate(Value (&s)[count][width]) {
#pragma unroll
    for (int i = 0; i < width; ++i) {
        Value first[by];
#pragma unroll
        for (int j = 0; j < by; ++j) first[j] = s[j][i];
#pragma unroll
        for (int j = 0; j < count; ++j)
            s[j][i] = j + by < count ? s[(j + by) % count][i] : first[(j + by) % count % by];
    }
}

// Scores or weights of a lane's rows g + 8 i of octets i: those of keys 8 j + 2 t and 8 j + 2 t + 1 of a tile, for lane
// = 4 g + t.
template <int octets, int tiles>
using FewScores = float[octets][tiles][2];

// Hides the keys of the tile that starts at `first_key` from the lane's row if its query does not see them.
template <int tiles>
__device__ inline void hide_keys(float (&s)[tiles][2], const Problem &problem, int query, int first_key) {
    using Keys = tile::NaturalKeys;
    const int lane_key = first_key + Keys::key(0, tile::accumulator_column(0));
    const int begin = problem.first_visible(query) - lane_key, end = problem.end_visible(query) - lane_key;
#pragma unroll
    for (int j = 0; j < tiles; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) s[j][i] = Keys::key(j, i) < end ? s[j][i] : -INFINITY;
    if (problem.options.left >= problem.keys) return;   // no window
#pragma unroll
    for (int j = 0; j < tiles; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) s[j][i] = Keys::key(j, i) >= begin ? s[j][i] : -INFINITY;
}

// Values of a lane's row g for lanes with the columns of O^T: those of rows 2 t and 2 t + 1.
struct OfColumns {
    float row[2];

    __device__ explicit OfColumns(float of_row) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            row[i] = __uint_as_float(ptx::shfl_sync_idx_b32(__float_as_uint(of_row), 4 * tile::accumulator_column(i)));
    }
};

// The running softmax of OnlineSoftmax for 8 rows of a warp, with O transposed: o[j] has 16 columns of the output
// as rows of the accumulator, and the rows of Q as its columns. row_max and row_sum belong to row g.
template <int dim>
struct FewSoftmax {
    using Rows = OnlineSoftmax<1, dim>;
    tile::Accumulator o[dim / 16];
    float row_max, row_sum;   // as those of OnlineSoftmax

    __device__ void start() {
#pragma unroll
        for (auto &accumulator : o)
#pragma unroll
            for (float &element : accumulator) element = 0.0f;
        row_max = no_maximum, row_sum = 0.0f;
    }

    // What OnlineSoftmax::take does.
    template <int tiles>
    __device__ __forceinline__ void take(float (&s)[tiles][2], float factor) {
        float most = fmaxf(s[0][0], s[0][1]);
#pragma unroll
        for (int j = 1; j < tiles; ++j) most = fmaxf(most, fmaxf(s[j][0], s[j][1]));
        most *= factor;
        if (ptx::vote_sync_any(most > row_max)) {
            most = tile::reduce_row(most, [](float a, float b) { return fmaxf(a, b); });
            most = most > row_max ? Rows::whole(most) : row_max;
            const float under_new = Rows::rescale(row_max, most);
            row_max = most;
            row_sum *= under_new;
            const OfColumns factors(under_new);
#pragma unroll
            for (auto &values : o)
#pragma unroll
                for (int i = 0; i < 4; ++i) values[i] *= factors.row[i % 2];
        }
        const Exponents exponents(row_max);
#pragma unroll
        for (auto &scores : s)
#pragma unroll
            for (float &score : scores) {
                score = exponents.weight(score, factor);
                row_sum += score;
            }
    }
};

// The most nodes of a row that a block merges.
constexpr int finished_nodes = 16;

// The nodes of a row, which are written, for finish_rows. The loads of `at_once` nodes are in flight together. Each
// column needs the maxima and sums of the first ones.
template <int at_once>
struct WrittenNodes {
    struct Figures {
        float max[at_once], sum[at_once];
    };
    const AttentionOptions &options;
    int nodes;
    size_t at, rows;   // of the row in a node; of a node
    Figures first;

    __device__ WrittenNodes(const AttentionOptions &options, int nodes, size_t at)
        : options(options), nodes(nodes), at(at),
          rows(size_t(options.batch) * options.heads_kv * options.group * options.queries), first(figures_from(0)) {}

    __device__ Figures figures_from(int node) const {
        Figures figures;
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
            const size_t place = at + (node + i) * rows;
            figures.max[i] = node + i < nodes ? options.row_max[place] : -INFINITY;
            figures.sum[i] = node + i < nodes ? options.row_sum[place] : 0.0f;
        }
        return figures;
    }

    // The sum of the nodes that begin with `node`. partial is not written where the maximum is -inf.
    __device__ Piece<merge_columns> sum_from(int node, const Figures &of, int column) const {
        Piece<merge_columns> some[at_once];
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
            const float *const from = options.partial + (at + (node + i) * rows) * options.dim_v + column;
            const float4 part = of.max[i] != -INFINITY ? *reinterpret_cast<const float4 *>(from) : float4{};
            some[i] = {of.max[i], {part.x, part.y, part.z, part.w, of.sum[i], of.sum[i]}};
        }
#pragma unroll
        for (int step = 1; step < at_once; step *= 2)
#pragma unroll
            for (int i = 0; i < at_once; i += 2 * step) some[i] = some[i].with(some[i + step]);
        return some[0];
    }

    __device__ Piece<merge_columns> operator()(int column) const {
        Piece<merge_columns> sum = sum_from(0, first, column);
        static_assert(finished_nodes <= 4 * at_once, "the right half of the tree has one batch or two");
#pragma unroll 1
        for (int half = at_once; half < nodes; half *= 2) {
            Piece<merge_columns> right = Piece<merge_columns>::none();
#pragma unroll 1
            for (int node = half; node < min(2 * half, nodes); node += at_once)
                right = right.with(sum_from(node, figures_from(node), column));
            sum = sum.with(right);
        }
        return sum;
    }
};

// Writes the outputs of rows first_row .. end_row - 1 of a problem. Equal numbers of threads have a row. dim_v is a
// multiple of merge_columns. nodes_of(row in the block, where the row is in a node)(column): the sum of all nodes.
template <int most, class NodesOf>
__device__ inline void finish_rows(const FewProblem &problem, int first_row, int end_row, const FewEnding &ending,
                                   NodesOf &&nodes_of) {
    constexpr int least_threads = 32 * node_chunks / most;   // of a row
    const bool half_full = end_row - first_row <= most / 2;
    const int row_threads = half_full ? 2 * least_threads : least_threads;
    const AttentionOptions &options = problem.options;
    const int in_block = half_full ? threadIdx.x / (2 * least_threads) : threadIdx.x / least_threads;
    const int row = first_row + in_block;
    if (row >= end_row) return;
    const size_t at = problem.row_at(row);
    const auto of_row = [&](auto *values) { return values ? values + at : nullptr; };
    const RowEnding of{options.sinks ? options.sinks + problem.head * options.group + problem.group_of(row) : nullptr,
                       options.softcap > 0.0f ? nullptr : of_row(options.row_shift),   // under a cap, scores contain it
                       ending.v_global ? ending.v_global + (ending.v_levels > 1 ? problem.head : 0) : nullptr,
                       of_row(options.lse),
                       of_row(ending.merged_max),
                       of_row(ending.merged_sum)};
    const auto piece_of = nodes_of(in_block, at);
#pragma unroll 1
    for (int column = threadIdx.x % row_threads * merge_columns; column < options.dim_v;
         column += row_threads * merge_columns) {
        const Piece<merge_columns> node = piece_of(column);
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

// The single node of a row, for finish_rows. Also writes it to partial.
template <class Finished>
struct KeptNode {
    const AttentionOptions &options;
    const Finished &rows;
    int in_block;
    size_t at;   // of the row in a node

    __device__ Piece<merge_columns> operator()(int column) const {
        const float max = rows.max[in_block], sum = rows.sum[in_block];
        float4 part{};
        if (max != -INFINITY) {
            part = *reinterpret_cast<const float4 *>(rows.o[in_block] + column);
            *reinterpret_cast<float4 *>(options.partial + at * options.dim_v + column) = part;
        }
        if (column == 0) options.row_max[at] = max, options.row_sum[at] = sum;
        return {max, {part.x, part.y, part.z, part.w, sum, sum}};
    }
};

// Attention of the rows of a block for one split of the nodes. Nodes are undivided sums and go to partial, row_max
// and row_sum of the options, as splits do. Few nodes become the outputs of `ending`: by the block itself if there is
// one split, or by the last block of the same rows that has written its nodes.
template <class Tiling, class Element>
__device__ __forceinline__ void attention_few(typename Tiling::Shared &shared, const Element *q,
                                              const StridesQ &q_strides, const CachedKeys &cached,
                                              const AttentionOptions &options, const FewEnding &ending) {
    using Keys = typename Tiling::Keys;
    using Units = typename Tiling::Units;
    using Columns = typename Units::Columns;
    constexpr int dim = Tiling::dim, units = Tiling::units, octets = Tiling::octets,
                  accumulators = dim / tile::mma_rows;
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

    const bool both = octets > 1 && end_row - first_row > 8;   // octets that have rows

    // The ring, and the cursor of the copies.
    char *const arena = shared.arena[warp].bytes;
    const FewRing ring = FewRing::of(cached, Tiling{});
    const int ring_end = ring.begin + ring.slots * ring.slot_bytes;
    // Warps share a single chunk, one tile each: the only one, or with `chunked` that of the block, which is its node.
    // The state of the softmax then goes from warp to warp.
    constexpr int chunk_tiles = UnitCursor<units>::chunk_tiles;
    const bool chunked = Keys::known && cached.node_keys == chunk_keys && options.splits == cached.nodes;
    const bool shares = chunked || (end_tile <= chunk_tiles && end_tile - first_tile > 1);
    const int shared_tile = chunked ? chunk_tiles * first_node : 0;   // where the shared chunk begins
    const int first_shared = max(first_tile, shared_tile), end_shared = min(end_tile, shared_tile + chunk_tiles);
    UnitCursor<units> coming(first_node, end_node, node_step, first_tile, end_tile, warp,
                             chunked ? chunk_tiles : node_chunks * chunk_tiles, shares);
    // What copies read.
    const auto made_source = [&](const CachedArray &array, const PagedRows &rows, int batch, bool packed,
                                 bool columns) {
        const bool whole =
            table.shift >= 0 && array.tile_dim == 0 && (array.format == RowFormat::plain || rows.aligned || packed);
        return FewSource{rows, array.format, array.tile_dim, batch, packed, whole, columns, rows.aligned};
    };
    const FewSource k_source = made_source(cached.k, k_rows, ring.k_batch, k_packed, false),
                    v_source = made_source(cached.v, v_rows, ring.v_batch, v_packed, cached.v.has_columns());
    // Whether rows of a unit follow one another and lack nothing.
    const auto has_runs = [&](const FewSource &source) {
        const PagedRows &rows = source.rows;
        const auto misplaced = [](const void *first, const PageStrides &strides) {
            return ((reinterpret_cast<uintptr_t>(first) | strides.page) & 15) != 0;
        };
        const int codes = Units::row_chunks(source.format), scales = Units::blocks(source.format);
        return source.whole && rows.chunks == codes && rows.code_strides.token == 16 * codes &&
               (source.format == RowFormat::plain ||
                (rows.scale_bytes == scales && rows.scale_strides.token == scales &&
                 !misplaced(rows.scales, rows.scale_strides)));
    };
    // The batches of known keys and values that are such runs and of which rows of Q see all: those from batch or unit
    // first_run on, as many as `runs`.
    constexpr bool all_at_once = Tiling::template takes_tiles<Keys>;
    constexpr int of_run = all_at_once ? Tiling::keys : tile::cached_rows;
    const unsigned first_run = ceil_div<unsigned>(first_key, of_run);
    const int runs = Keys::known && has_runs(k_source) && has_runs(v_source)
                         ? max(int(unsigned(end_key) / of_run - first_run) - (all_at_once ? 0 : ring.k_batch - 1), 0)
                         : 0;
    const auto is_run = [&](unsigned tile, unsigned unit) {
        if constexpr (Keys::known) return (all_at_once ? tile : unit) - first_run < unsigned(runs);
        else return false;
    };
    // Lanes have the addresses of known rows as they have those of units: all in every lane would take registers.
    const auto of_lane = [&](const char *k, const char *v) {
        const char *const address = tile::lane_has_keys<units>() ? k : v;
        return Keys::known ? tile::kept(address) : address;
    };
    const char *const lane_codes = of_lane(k_rows.codes, v_rows.codes), *const lane_scales =
                                                                            of_lane(k_rows.scales, v_rows.scales);
    const auto either = [&](bool keys) {   // a copy: references would put both in local memory
        return keys ? k_source : v_source;
    };
    const auto source_of = [&](bool keys) {
        FewSource source = either(keys);
        if constexpr (Keys::known) {
            source.rows.codes = tile::of_unit(lane_codes, keys ? 0 : units);
            source.rows.scales = tile::of_unit(lane_scales, keys ? 0 : units);
        }
        return source;
    };
    int filled = ring.begin;   // offset of the next slot
    // The pages of the units of this warp's chunk of a node, as lane_unit() says. They are loaded one node ahead.
    constexpr int chunk_units = chunk_keys / tile::cached_rows;
    static_assert(2 * chunk_units == 32, "each lane has a unit of keys or of values");
    const auto chunk_of = [&](int node) { return chunked ? node : node * node_chunks + (shares ? 0 : warp); };
    const auto pages_of = [&](int node) {
        if (table.shift < 0 || node >= end_node) return 0;
        const int unit = chunk_of(node) * chunk_units + tile::lane_unit<units>();
        return table.page_of(max(min(unit * tile::cached_rows, end_key - 1), first_key));
    };
    int pages_next = pages_of(coming.node), found = -1;   // found: the node of the next addresses
    // The addresses of these units.
    const char *codes_here = nullptr, *scales_here = nullptr;
    const auto find_units = [&](int chunk) {
        const PagedRows rows = either(tile::lane_has_keys<units>()).rows;
        const int row = table.row_of((chunk * chunk_units + tile::lane_unit<units>()) * tile::cached_rows);
        codes_here = rows.code_strides.row(lane_codes, pages_next, row);
        scales_here = rows.scale_strides.row(lane_scales, pages_next, row);
    };
    const uint32_t arena_address = static_cast<uint32_t>(__cvta_generic_to_shared(arena));
    // Copies a unit row by row.
    const auto fetch_unit = [&](int part, char *unit) {
        const uint32_t target = static_cast<uint32_t>(__cvta_generic_to_shared(unit));
        const int first = coming.tile() * Tiling::keys + part * tile::cached_rows;
        const bool keys = coming.has_keys();
        const FewSource source = source_of(keys);
        const PagedRows from = source.rows;
        const RowFormat format = source.format;
        if (source.tile_dim) {
            const char *tile =
                from.code_strides.row(from.codes, problem.batch, problem.first_tile(Tiling::keys) + coming.tile());
            if (source.columns) return Units::copy_columns(target, format, tile, part, source.tile_dim);
            const tile::TileRows rows(source.tile_dim * tile::bits_of(format) / 8, keys);
            const int first_row = part * tile::cached_rows;
            Units::copy_rows(target, format, keys, [&](int row, int chunk) {
                return chunk < rows.chunks ? tile + 16 * rows.index(first_row + row, chunk) : nullptr;
            });
            if (format == RowFormat::plain) return;
            const int blocks = tile::blocks_of(format, source.tile_dim), step = ceil_div(blocks, 4) * 4;
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
            Units::copy_scales(unit, format, from.scale_bytes, source.aligned, source.packed,
                               [&](int row) { return row_of(from.scales, from.scale_strides, row); });
    };
    // Copies a batch of units, each within one page, from key `first` on. Keys that no row sees become zeros.
    const auto fetch_whole = [&](const FewSource &source, bool keys, int first) {
        const PagedRows &from = source.rows;
        const typename Units::WholeRows codes{static_cast<unsigned>(from.code_strides.token), from.chunks},
            scales{static_cast<unsigned>(from.scale_strides.token), from.scale_bytes};
        tile::with_format<Element>(source.format, [&](auto format) {
            using Format = decltype(format);
            Units::template copy_whole<Format, Tiling::template batch<Format>>(
                arena_address + filled, keys, first_key - first, end_key - first, codes, scales, source.packed,
                [&](int i) { return tile::of_unit(codes_here, coming.at + i); },
                [&](int i) { return tile::of_unit(scales_here, coming.at + i); });
        });
    };
    unsigned run_place = 0;   // of codes
    if constexpr (Keys::known)
        run_place = tile::kept(
            Units::template place_of_run<typename Keys::Format, Tiling::template batch<typename Keys::Format>>(false));
    // Copies a batch of known keys or values, each within one page and all of which rows of Q see.
    const auto fetch_runs = [&]() __attribute__((always_inline)) {
        if constexpr (Keys::known) {
            using Format = typename Keys::Format;
            constexpr int batch = Tiling::template batch<Format>;
            const unsigned lane = coming.at + tile::lane_part<batch>();
            const char *const codes = tile::of_unit(codes_here, lane), *const scales = tile::of_unit(scales_here, lane);
            Units::template copy_runs<Format, batch>(
                arena_address + filled,
                Format::bits < 16 ? run_place : Units::template place_of_run<Format, batch>(coming.has_keys()), codes,
                scales);
        }
    };
    // Starts copying the next batch as one group of copies. Behind the last batch groups are empty, so that the count
    // of wait() stays right.
    const auto fetch = [&]() __attribute__((always_inline)) {   // a tile is a whole number of batches
        if (coming.there()) {
            if (found != coming.node) {
                found = coming.node;
                find_units(chunk_of(found));
                pages_next = pages_of(found + node_step);
            }
            const bool keys = coming.has_keys();
            const int batch = keys ? ring.k_batch : ring.v_batch;
            const unsigned part = coming.part() % units, unit = coming.tile() * units + part;
            if (is_run(coming.tile(), unit)) {
                fetch_runs();
            } else {
                // Packed scales of two rows are copied at once, so both rows must be keys that rows of Q see.
                const FewSource source = source_of(keys);
                const int first = unit * tile::cached_rows;
                const bool all_shown = first >= first_key && first + batch * tile::cached_rows <= end_key;
                if (source.whole && (all_shown || !source.packed)) {
                    fetch_whole(source, keys, first);
                } else {
                    const int bytes = source.columns ? Units::column_bytes(source.format) : Units::bytes(source.format);
#pragma unroll 1
                    for (int i = 0; i < batch; ++i) fetch_unit(part + i, arena + filled + i * bytes);
                }
            }
            coming.advance(batch);
        }
        filled = filled + ring.slot_bytes == ring_end ? ring.begin : filled + ring.slot_bytes;
        ptx::cp_async_commit_group();
    };
    // Q, in registers or in shared memory.
    tile::FragmentA all_q[dim / 16];
    tile::load_queries<Element, dim, octets>(all_q, options.dim, [&](int row) {
        return first_row + row < end_row ? q + problem.at(q_strides, first_row + row) : nullptr;
    });
    constexpr bool has_halves = Tiling::has_halves;
    constexpr int words = sizeof(typename Tiling::Query) / 4;   // of a lane
    bool halves = has_halves && cached.k.format == RowFormat::mxfp8;
    typename Tiling::Query kept_q[dim / 16];
#pragma unroll
    for (int step = 0; step < dim / 16; ++step)
#pragma unroll
        for (int i = 0; i < words; ++i) kept_q[step][i] = all_q[step][4 / words * i];
    if constexpr (!Tiling::keeps_q) {
#pragma unroll
        for (int step = 0; step < dim / 16; ++step)
#pragma unroll
            for (int i = 0; i < words; ++i) {   // equal in all warps
                tile::of_lane(shared.q[0][step])[i] = kept_q[step][i];
                if constexpr (has_halves)
                    tile::of_lane(shared.q[1][step])[i] = tile::lifted_half(kept_q[step][i], halves);
            }
        ptx::bar_sync();   // all threads see Q
    }
    halves = !ptx::vote_sync_any(!halves);
    const auto query = [&](int kind, int step) -> const typename Tiling::Query & {
        if constexpr (Tiling::keeps_q) return kept_q[step];
        else return tile::of_lane(shared.q[kind][step]);
    };

    // Factors of scores and outputs, and the state of reading.
    const float scale = options.scale * tile::lift_of(cached.k.format) * (cached.q_global ? *cached.q_global : 1.0f) *
                        (cached.k_global ? cached.k_global[cached.levels == 1 ? 0 : problem.head] : 1.0f);
    const float factor = score_factor(problem, scale), value_lift = tile::lift_of(cached.v.format);
    const bool natural_columns = cached.v.format == RowFormat::plain || cached.v.has_columns();
    int lane_queries[octets];
#pragma unroll
    for (int octet = 0; octet < octets; ++octet)
        lane_queries[octet] = problem.query_of(first_row + tile::accumulator_row(2 * octet));
    const uint32_t of_columns = tile::address_a(*reinterpret_cast<Columns *>(arena)) - arena_address;
    // Where this lane reads known codes and turned scores, computed once.
    typename Units::Places k_places, v_places;
    tile::TurnedScores::Places turned_places = tile::TurnedScores::places();
    if constexpr (Keys::known) {
        using Format = typename Keys::Format;
        const auto keep = [](unsigned &place) { place = tile::kept(place); };
        k_places = Units::template key_places<Format>(k_packed);
        v_places = Units::template value_places<Format>(v_packed);
        keep(k_places.codes), keep(k_places.scales), keep(v_places.codes), keep(v_places.scales);
        keep(turned_places.store), keep(turned_places.load);
    }
    const auto key_places = [&](auto of) {
        if constexpr (Keys::known) return k_places;
        else return Units::template key_places<decltype(of)>(k_packed);
    };
    const auto value_places = [&](auto of) {
        if constexpr (Keys::known) return v_places;
        else return Units::template value_places<decltype(of)>(v_packed);
    };
    int empty = ring.slots;   // slots to fill: at first all, then the one that was read last

    // Fills the ring. All lanes have read the batch before, and see turned scores.
    const auto fill = [&]() __attribute__((always_inline)) {
        ptx::bar_warp_sync();
#pragma unroll 1
        for (; empty > 0; --empty) fetch();
        empty = 1;
    };
    // The oldest batch, when all lanes see it: it is in the slot to fill next.
    const auto next_slot = [&]() __attribute__((always_inline)) {
        ring.wait();
        ptx::bar_warp_sync();
        return arena + filled;
    };

    // Who writes nodes, and where a single node is for its outputs.
    const int writer = shares ? max(end_shared - 1 - shared_tile, 0) : 0;
    const bool finishes = ending.wanted && cached.nodes <= finished_nodes && (options.splits == 1 || ending.arrivals);
    const bool keeps_node = finishes && options.splits == 1 && cached.nodes == 1;
    typename Tiling::Finished &finished = *reinterpret_cast<typename Tiling::Finished *>(shared.arena[writer].bytes);

    // All nodes: the softmax over the warp's tiles, then the sum of the four warps.
    UnitCursor<units> here = coming;
#pragma unroll 1
    for (int node = first_node; node < end_node; node += node_step) {
        FewSoftmax<dim> softmax[octets];
#pragma unroll
        for (auto &of_octet : softmax) of_octet.start();
        // Stores columns of O from accumulator `first` on, and maxima and sums.
        const auto send = [&](auto &to, int first) {
#pragma unroll
            for (int octet = 0; octet < octets; ++octet) {
                if (octet > 0 && !both) continue;
#pragma unroll
                for (int j = 0; j < std::remove_reference_t<decltype(to)>::tiles; ++j) {
                    const tile::Accumulator &o = softmax[octet].o[first + j];
                    to.accumulator(octet, j) = {o[0], o[1], o[2], o[3]};
                }
                to.row_max(octet) = softmax[octet].row_max, to.row_sum(octet) = softmax[octet].row_sum;
            }
        };
        const auto scores_at = [&](int j) -> float4 & {
            return reinterpret_cast<typename Tiling::Node *>(arena)->accumulator(j / Tiling::Node::tiles,
                                                                                 j % Tiling::Node::tiles);
        };
        tile::TurnedScores &turned = *reinterpret_cast<tile::TurnedScores *>(arena);
        // The state of the softmax after a tile of a shared chunk, which the warp of the next tile continues. Each pair
        // of neighbors has a barrier of its own, so that no other warp waits.
        const auto state_of = [&](int tile) ->
            typename Tiling::State & { return *reinterpret_cast<typename Tiling::State *>(shared.arena[tile].bytes); };
        const auto continue_after = [&](int tile) {
            ptx::bar_sync(1 + tile, 2 * 32);   // this warp sees that state
            typename Tiling::State &from = state_of(tile);
#pragma unroll
            for (int octet = 0; octet < octets; ++octet) {
                if (octet > 0 && !both) continue;
#pragma unroll
                for (int j = 0; j < accumulators; ++j) {
                    const float4 four = from.accumulator(octet, j);
                    tile::Accumulator &o = softmax[octet].o[j];
                    o[0] = four.x, o[1] = four.y, o[2] = four.z, o[3] = four.w;
                }
                softmax[octet].row_max = from.row_max(octet), softmax[octet].row_sum = from.row_sum(octet);
            }
        };
#pragma unroll 1
        for (; here.node == node; here.advance(UnitCursor<units>::of_tile)) {
            const int tile_key = here.tile() * Tiling::keys;
            const auto is_common = [&] {   // whether all rows see all keys of the tile
                // A single query sees those from first_key to end_key.
                return tile_key >= (Keys::known ? first_key : first_common) &&
                       tile_key + Tiling::keys <= (Keys::known ? end_key : end_common);
            };
            // Zero times a value that is not finite is NaN. So if rows see different keys, each query has a pass of its
            // own, with zeros in place of the values that it does not see. Tiles with columns need this even for a
            // single query, since they also hold keys that no query sees.
            const bool isolates = (first_query != last_query || cached.v.has_columns()) && !is_common();
            // A batch of keys at a time gives the scores of the tile, which become weights, and then a batch of values
            // at a time joins the sums. Both wait for their slot in the same place, since its code is long.
            FewScores<octets, 2 * units> s;
            tile::FragmentB p[octets][units];   // P^T
            constexpr int mx_batch = Tiling::template batch<tile::CachedMxfp4>,
                          half_batch = has_halves ? Tiling::template batch<tile::CachedMxfp8> : 0;
            // Makes weights of the scores of the tile.
            const auto make_weights = [&]() __attribute__((always_inline)) {
                if constexpr (Tiling::turns_scores) {
                    if (!Tiling::weights_late) ptx::bar_warp_sync();   // all lanes see the scores
#pragma unroll
                    for (int j = 0; j < 2 * units; ++j) turned.load(turned_places, s[0][j], j);
                }
                if (shares && here.tile() > first_shared) continue_after(here.tile() - 1 - shared_tile);
                if (!Keys::known && problem.transforms_scores()) {
                    tile::Accumulator some[1][2 * units] = {};
#pragma unroll
                    for (int j = 0; j < 2 * units; ++j) {
                        if constexpr (Tiling::keeps_scores) {
#pragma unroll
                            for (int i = 0; i < 2 * octets; ++i) some[0][j][i] = s[i / 2][j][i % 2];
                        } else {
                            const float4 four = scores_at(j);
                            some[0][j][0] = four.x, some[0][j][1] = four.y;
                            some[0][j][2] = four.z, some[0][j][3] = four.w;
                        }
                    }
                    transform_scores<tile::NaturalKeys, true>(
                        some, problem,
                        [&](int, int half) {
                            return min(first_row + tile::accumulator_row(octets > 1 ? 2 * half : 0), problem.rows - 1);
                        },
                        tile_key, scale);
#pragma unroll
                    for (int j = 0; j < 2 * units; ++j) {
                        if constexpr (Tiling::keeps_scores) {
#pragma unroll
                            for (int i = 0; i < 2 * octets; ++i) s[i / 2][j][i % 2] = some[0][j][i];
                        } else {
                            scores_at(j) = {some[0][j][0], some[0][j][1], some[0][j][2], some[0][j][3]};
                        }
                    }
                }
#pragma unroll
                for (int octet = 0; octet < octets; ++octet) {
                    if (octet > 0 && !both) continue;
                    if constexpr (!Tiling::keeps_scores) {
#pragma unroll
                        for (int j = 0; j < 2 * units; ++j) {
                            const float2 two = reinterpret_cast<const float2 *>(&scores_at(j))[octet];
                            s[octet][j][0] = two.x, s[octet][j][1] = two.y;
                        }
                    }
                    if (!is_common()) hide_keys(s[octet], problem, lane_queries[octet], tile_key);
                    softmax[octet].take(s[octet], factor);
#pragma unroll
                    for (int i = 0; i < units; ++i)
#pragma unroll
                        for (int half = 0; half < 2; ++half)
                            p[octet][i][half] =
                                tile::rounded_pair(s[octet][2 * i + half][1], s[octet][2 * i + half][0], Element{});
                }
            };
            int batch;
#pragma unroll 1
            for (int step = 0; step < 2 * units; step += batch) {
                fill();
                if (Tiling::weights_late && step == units) make_weights();
                char *const slot = next_slot();
                batch = step < units ? ring.k_batch : ring.v_batch;
                if (step < units) {
                    // Weights are of the tile before, and below, scores are weights.
#pragma unroll
                    for (auto &of_octet : p)
#pragma unroll
                        for (auto &pairs : of_octet) ptx::forget(pairs[0]), ptx::forget(pairs[1]);
                    Units::template with_format_of<mx_batch, half_batch>(cached.k.format, slot, halves, [&](auto of) {
                        constexpr int in_batch = Tiling::template batch<decltype(of)>;
                        if constexpr (Tiling::turns_scores) {
                            // Two units at a time: more would occupy registers without need, since expansion hides
                            // the latency of MMAs.
                            constexpr bool half = tile::is_half<decltype(of)>;
                            constexpr int at_once = in_batch < 2 ? 1 : 2;
#pragma unroll 1
                            for (int i = 0; i < in_batch; i += at_once) {
                                tile::Accumulator sums[at_once] = {};
                                Units::multiply_queries(
                                    sums, slot + i * Units::template row_bytes<decltype(of)>(), key_places(of),
                                    [&](int at) -> const tile::FragmentB & { return query(half ? 1 : 0, at); }, of);
#pragma unroll
                                for (int j = 0; j < at_once; ++j)
                                    turned.store(turned_places, step + i + j, sums[j], half ? 0x1p-16f : 1.0f);
                            }
                        } else {
                            constexpr int groups = 2 * in_batch, at_once = dim > 128 ? 1 : groups;
                            if constexpr (Tiling::keeps_scores) {
#pragma unroll
                                for (auto &of_octet : s) move_up<groups>(of_octet);
                            }
#pragma unroll
                            for (int group = 0; group < groups; group += at_once) {
                                tile::Accumulator sums[at_once] = {};
                                Units::multiply_keys(
                                    sums, slot, group, k_packed, [&](int at) -> const auto & { return query(0, at); },
                                    of);
#pragma unroll
                                for (int j = 0; j < at_once; ++j) {
                                    if constexpr (Tiling::keeps_scores) {
#pragma unroll
                                        for (int i = 0; i < 2 * octets; ++i)
                                            s[i / 2][2 * units - groups + group + j][i % 2] = sums[j][i];
                                    } else {
                                        scores_at(2 * step + group + j) = {sums[j][0], sums[j][1], sums[j][2],
                                                                           sums[j][3]};
                                    }
                                }
                            }
                        }
                    });
                    if (!Tiling::weights_late && step + batch >= units) make_weights();
                    continue;
                }
#pragma unroll
                for (auto &of_octet : s)
#pragma unroll
                    for (auto &scores : of_octet) ptx::forget(scores[0]), ptx::forget(scores[1]);
                // O^T += V^T P^T, in one pass for all queries, or in a pass for each query with only its keys.
                const int part = step - units;
                // Adds a fragment of V^T times unit `unit` of P^T to accumulator j, for the first `count` octets.
                const auto add_to = [&](auto count, int j, const tile::FragmentA &v, int unit) {
#pragma unroll
                    for (int octet = 0; octet < count; ++octet)
                        tile::multiply(softmax[octet].o[j], v, p[octet][unit], Element{});
                };
                const auto add_all = [&](int j, const tile::FragmentA &v, int unit) {
                    add_to(std::integral_constant<int, octets>{}, j, v, unit);
                };
                const auto add_shown = [&](int j, const tile::FragmentA &v, int unit, int query,
                                           const bool (&is_of_query)[octets][2], int first) {
                    const int begin = problem.first_visible(query) - first, end = problem.end_visible(query) - first;
                    const auto seen = tile::pair_masks([&](int key) { return key >= begin && key < end; });
                    const tile::FragmentA shown{v[0] & seen.pair[0], v[1] & seen.pair[0], v[2] & seen.pair[1],
                                                v[3] & seen.pair[1]};
#pragma unroll
                    for (int octet = 0; octet < octets; ++octet) {
                        tile::Accumulator &o = softmax[octet].o[j], sum;
                        tile::copy(sum, o);
                        tile::multiply(sum, shown, p[octet][unit], Element{});
#pragma unroll
                        for (int i = 0; i < 4; ++i) o[i] = is_of_query[octet][i % 2] ? sum[i] : o[i];
                    }
                };
                // Calls pass(query, whether the rows of a lane's columns of O^T are of that query) for all queries.
                const auto for_queries = [&](auto &&pass) {
#pragma unroll 1
                    for (int query = first_query; query <= last_query; ++query) {
                        ptx::bar_warp_sync();   // values expanded before this loop would occupy registers
                        bool is_of_query[octets][2];
#pragma unroll
                        for (int octet = 0; octet < octets; ++octet) {
                            const OfColumns of_query(lane_queries[octet] == query ? 1.0f : 0.0f);
#pragma unroll
                            for (int i = 0; i < 2; ++i) is_of_query[octet][i] = of_query.row[i] != 0.0f;
                        }
                        pass(query, is_of_query);
                    }
                };
                if (!cached.v.has_columns()) {
                    // Units of rows: 16 keys, all columns.
                    const auto add_octets = [&](auto count, auto of) __attribute__((always_inline)) {
                        constexpr int bytes = Units::template row_bytes<decltype(of)>();
                        constexpr int all = Tiling::template batch<decltype(of)>;
                        // Units of known codes in the code at once. Weights are moved less often, but mxfp4 has two
                        // bodies, and code that runs once comes from memory.
                        constexpr bool has_bodies = Keys::may_be(RowFormat::mxfp4);
                        constexpr int at_once = !Keys::known || decltype(of)::bits > 4 ? 1
                                                : has_bodies && all % 2 == 0           ? 2
                                                                                       : all;
                        // An opaque end: else the first unit stands apart.
                        const int end = at_once == all ? all : ptx::of_this_branch(all);
#pragma unroll 1
                        for (int i = 0; i < end; i += at_once) {
#pragma unroll
                            for (int j = 0; j < at_once; ++j) {
                                Units::for_values(
                                    slot + (i + j) * bytes, v_packed, value_places(of),
                                    [&](int j, const tile::FragmentA &v) { add_to(count, j, v, 0); }, of);
#pragma unroll
                                for (int octet = 0; octet < count; ++octet) {
                                    if constexpr (Keys::known) move_up<1>(p[octet]);
                                    else rotate<1>(p[octet]);
                                }
                            }
                        }
                    };
                    const auto add_units = [&](auto of) __attribute__((always_inline)) {
                        if (both) add_octets(std::integral_constant<int, octets>{}, of);
                        else add_octets(std::integral_constant<int, 1>{}, of);
                    };
                    const auto add_isolated = [&](auto of) {
                        constexpr int bytes = Units::template row_bytes<decltype(of)>();
#pragma unroll 1
                        for (int i = 0; i < Tiling::template batch<decltype(of)>; ++i) {
                            for_queries([&](int query, const bool (&is_of_query)[octets][2]) {
                                Units::for_values(
                                    slot + i * bytes, v_packed, value_places(of),
                                    [&](int j, const tile::FragmentA &v) {
                                        add_shown(j, v, 0, query, is_of_query,
                                                  tile_key + (part + i) * tile::cached_rows);
                                    },
                                    of);
                            });
#pragma unroll
                            for (auto &of_octet : p) move_up<1>(of_octet);
                        }
                    };
                    if (isolates) tile::with_format<Element>(cached.v.format, add_isolated);
                    else Units::template with_format_of<mx_batch, 0>(cached.v.format, slot, false, add_units);
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
                        const auto add = [&](auto &&add_to) {
#pragma unroll
                            for (int step = 0; step < units; ++step) {
#pragma unroll
                                for (int j = 0; j < Units::quarter / 16; ++j) {
                                    tile::FragmentA v;
                                    tile::load_a<Columns>(v, columns_address, 16 * j, 2 * step);
                                    add_to(j, v, step);
                                }
                            }
                        };
                        if (isolates)
                            for_queries([&](int query, const bool (&is_of_query)[octets][2]) {
                                add([&](int j, const tile::FragmentA &v, int step) {
                                    add_shown(j, v, step, query, is_of_query, tile_key + step * tile::cached_rows);
                                });
                            });
                        else add(add_all);
                        // The quarter's accumulators are the first ones. After four quarters all are in place again.
#pragma unroll
                        for (auto &rows : softmax) rotate<accumulators / 4>(rows.o);
                    }
                }
            }
        }
        ptx::bar_warp_sync();   // all lanes have read what was copied or expanded last
        const int own_tile = shared_tile + warp;
        if (shares && (chunked || node == 0) && own_tile >= first_shared && own_tile < end_shared - 1) {
            send(state_of(warp), 0);
            ptx::bar_sync(1 + warp, 2 * 32);   // the next warp sees it
        }
#pragma unroll
        for (auto &rows : softmax) {
            rows.row_sum = tile::reduce_row(rows.row_sum, [](float a, float b) { return a + b; });
            if (rows.row_sum == 0.0f) rows.row_max = -INFINITY;   // a row without keys
        }

        // The node: chunks 0 + 1 and 2 + 3 of the four warps, then the sum of both.
        const auto node_of = [&](int warp) ->
            typename Tiling::Node & { return *reinterpret_cast<typename Tiling::Node *>(shared.arena[warp].bytes); };
        const auto take = [&](typename Tiling::Node &from, int first) {
#pragma unroll
            for (int octet = 0; octet < octets; ++octet) {
                if (octet > 0 && !both) continue;
                FewSoftmax<dim> &rows = softmax[octet];
                const NodeSum sum(rows.row_max, from.row_max(octet));
                const OfColumns lefts(sum.left), rights(sum.right);
                const auto add = [&](float &left, float right, int i) {
                    left = fmaf(left, lefts.row[i], right * rights.row[i]);   // as sum.add
                };
#pragma unroll
                for (int j = 0; j < Tiling::exchanged / tile::mma_rows; ++j) {
                    if (j > 0 && j % 4 == 0) ptx::bar_warp_sync();   // more right sides would occupy registers
                    const float4 right = from.accumulator(octet, j);
                    tile::Accumulator &o = rows.o[first + j];
                    add(o[0], right.x, 0), add(o[1], right.y, 1), add(o[2], right.z, 0), add(o[3], right.w, 1);
                }
                if (first + Tiling::exchanged / tile::mma_rows < accumulators)
                    continue;   // later columns need the old maxima
                rows.row_sum = sum.add(rows.row_sum, from.row_sum(octet));
                rows.row_max = sum.max;
            }
        };
        // If all columns are exchanged at once, no warp writes again where another one reads.
        constexpr bool at_once = Tiling::exchanged == dim && octets == 1;
#pragma unroll
        for (int level = 1; level < Tiling::warps; level *= 2) {
            // Right sides behind the last key add nothing.
            if (chunked || (node * node_chunks + level) * (chunk_units / units) >= end_tile) continue;
#pragma unroll
            for (int first = 0; first < accumulators; first += Tiling::exchanged / tile::mma_rows) {
                if (warp % (2 * level) == level) send(node_of(warp), first);
                ptx::bar_sync();   // all threads see the right sides
                if (warp % (2 * level) == 0) take(node_of(warp + level), first);
                if (!at_once) ptx::bar_sync();   // all threads have read them
            }
        }
        if (at_once && node + node_step < end_node) ptx::bar_sync();   // the same
        // The warp that has the sum of all chunks writes the node, for finish_rows into its ring, which is empty then.
        if (warp != writer) continue;
        const size_t first_at = size_t(node) * options.batch * options.heads_kv * options.group * options.queries;
#pragma unroll
        for (int octet = 0; octet < octets; ++octet) {
            if (octet > 0 && !both) continue;
            const FewSoftmax<dim> &rows = softmax[octet];
            const int of_lane = tile::accumulator_row(2 * octet);
            if (tile::accumulator_column(0) == 0 && first_row + of_lane < end_row) {
                const size_t at = first_at + problem.row_at(first_row + of_lane);
                *(keeps_node ? finished.max + of_lane : options.row_max + at) = rows.row_max;
                *(keeps_node ? finished.sum + of_lane : options.row_sum + at) = rows.row_sum;
            }
            const OfColumns maxima(rows.row_max);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int in_block = 8 * octet + tile::accumulator_column(i), row = first_row + in_block;
                // Merging ignores nodes without keys, so their values need not be written.
                if (row >= end_row || maxima.row[i] == -INFINITY) continue;
                const size_t at = first_at + problem.row_at(row);
                // One code stores to both memories.
                float *const target =
                    ptx::of_this_branch(keeps_node ? finished.o[in_block] : options.partial + at * options.dim_v);
                if (natural_columns) {
#pragma unroll
                    for (int j = 0; j < 2 * accumulators; ++j) {
                        const int column = j * tile::mma_columns + tile::accumulator_row(0);
                        if (column < options.dim_v) target[column] = rows.o[j / 2][2 * (j % 2) + i] * value_lift;
                    }
                } else {   // a lane has a run of columns; dim_v of block formats is a multiple of 4
#pragma unroll
                    for (int j = 0; j < accumulators; j += 2) {
                        const int column = tile::accumulator_row(0) * (2 * accumulators) + 2 * j;
                        if (column >= options.dim_v) continue;
                        const tile::Accumulator *o = rows.o + j;
                        *reinterpret_cast<float4 *>(target + column) = {o[0][i] * value_lift, o[0][2 + i] * value_lift,
                                                                        o[1][i] * value_lift, o[1][2 + i] * value_lift};
                    }
                }
            }
        }
    }
    if (!finishes) return;
    ptx::bar_sync();   // all threads see the nodes of this block
    // Of the blocks with nodes of these rows the last one merges them.
    if (options.splits > 1) {
        const uint32_t last = options.splits - 1;
        uint32_t *const arrivals = ending.arrivals + problem.row_at(first_row);
        if (!ptx::bar_red_or(threadIdx.x == 0 && ptx::atom_acq_rel_inc(arrivals, last) == last)) return;
    }
    using Kept = KeptNode<typename Tiling::Finished>;
    using Written = WrittenNodes<Keys::known ? 8 : 4>;
    // Known keys have a body for each, which is short: what runs once comes from memory.
    if constexpr (Keys::known) {
        const auto finish = [&](auto &&nodes_of) {
            finish_rows<Tiling::rows>(problem, first_row, end_row, ending, nodes_of);
        };
        if (keeps_node) [[likely]]
            finish([&](int in_block, size_t at) { return Kept{options, finished, in_block, at}; });
        else finish([&](int, size_t at) { return Written(options, cached.nodes, at); });
    } else {
        finish_rows<Tiling::rows>(problem, first_row, end_row, ending, [&](int in_block, size_t at) {
            return [&, in_block, at](int column) {
                if (keeps_node) [[likely]]
                    return Kept{options, finished, in_block, at}(column);
                return Written(options, cached.nodes, at)(column);
            };
        });
    }
}

}   // namespace op
