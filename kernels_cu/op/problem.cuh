// One problem of attention: the options of an entry, the rows of a block, and the keys that each row sees.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "../kernel.cuh"
#include "../ptx/alu.cuh"
#include "../ptx/cvt.cuh"
#include "../ptx/math.cuh"
#include "../ptx/warp.cuh"
#include "../tile/block_tiles.cuh"
#include "sequences.cuh"

namespace op {

constexpr float log2_e = 1.4426950408889634f, ln_2 = 0.6931471805599453f;

// Keys in a unit of splitting. Every tile size divides it, so that splits begin at tiles.
constexpr int split_unit = tile::tile_keys;

// Consecutive queries of a head that share a mean when queries are smoothed.
constexpr int smooth_queries = 64;

// x / y of whole numbers up to 2 `few` in few instructions. The approximate reciprocal is wrong by less than what x
// lacks to the next half.
constexpr int few = 1 << 20;
__device__ inline int quotient_of_few(int x, int y) {
    return int((float(x) + 0.5f) * ptx::rcp_approx_ftz_f32(float(y)));
}

// Strides in elements over the axes before the last, which is contiguous.
struct StridesQ {   // [batch, heads_kv, group, queries, dim]
    long long batch, head, group, query;
};
struct StridesK {   // [batch, heads_kv, keys, dim]
    long long batch, head, key;
};
struct StridesMask {   // [batch, heads_kv, group, queries, keys]; any may be 0
    long long batch, head, group, query, key;
};

// The arrays and numbers that every attention entry takes behind its operands, in the order of its parameters: X(type,
// name) for each, where X is AS_PARAMETER, AS_MEMBER or AS_ARGUMENT. Missing arrays are null. clang-format off
#define ATTENTION_ARRAYS(X)                                                                                            \
    X(const float *, mask)       /* [batch, heads_kv, group, queries, keys]: added to the scaled scores */             \
    X(const uint8_t *, allowed)  /* [batch, heads_kv, group, queries, keys]: 0 hides a key */                          \
    X(const float *, sinks)      /* [heads_kv, group]: one logit per head that joins the denominator */                \
    X(const int *, query_starts) /* [sequences]: the first row of Q of each packed sequence */                         \
    X(const int *, query_ends)   /* [sequences]: the row behind the last */                                            \
    X(const int *, key_starts)   /* [sequences] */                                                                     \
    X(const int *, key_ends)     /* [sequences] */                                                                     \
    X(__nv_bfloat16 *, out_bf16) /* [batch, heads_kv, group, queries, dim_v] */                                        \
    X(__half *, out_f16)         /* [batch, heads_kv, group, queries, dim_v] */                                        \
    X(float *, out_f32)          /* [batch, heads_kv, group, queries, dim_v] */                                        \
    X(float *, lse)              /* [batch, heads_kv, group, queries] */                                               \
    X(float *, partial)          /* [splits, batch, heads_kv, group, queries, dim_v]: not divided by row_sum */        \
    X(float *, row_max)          /* [splits, batch, heads_kv, group, queries]: in units of log2 */                     \
    X(float *, row_sum)          /* [splits, batch, heads_kv, group, queries] */
#define ATTENTION_SCALARS(X)                                                                                           \
    X(float, scale)                                                                                                    \
    X(float, softcap) /* 0: none */                                                                                    \
    X(int, left)      /* query i sees key j if -left <= j - (i + keys - queries) <= right */                           \
    X(int, right)
// The strides of the arrays that have strides: MASK(name) and ROWS(name), which are STRIDES_* or THE_STRIDES_*.
#define ATTENTION_STRIDES(MASK, ROWS) MASK(mask), MASK(allowed), ROWS(out_bf16), ROWS(out_f16), ROWS(out_f32)
// clang-format on

// The strides of one array as parameters of an entry, and as a struct.
#define STRIDES_Q(array)                                                                                               \
    long long array##_batch, long long array##_head, long long array##_group, long long array##_query
#define STRIDES_K(array) long long array##_batch, long long array##_head, long long array##_key
#define STRIDES_MASK(array) STRIDES_Q(array), long long array##_key
#define THE_STRIDES_Q(array) {array##_batch, array##_head, array##_group, array##_query}
#define THE_STRIDES_K(array) {array##_batch, array##_head, array##_key}
#define THE_STRIDES_MASK(array) {array##_batch, array##_head, array##_group, array##_query, array##_key}

// What an attention entry takes besides its operands.
struct AttentionOptions {
    ATTENTION_ARRAYS(AS_MEMBER)
    const float
        *row_shift;   // [batch, heads_kv, group, queries] or null: what is missing from all scaled scores of a row
    ATTENTION_SCALARS(AS_MEMBER)
    int batch, heads_kv, group, queries, dim, keys, dim_v, sequences, splits;
    StridesMask mask_strides, allowed_strides;
    StridesQ out_bf16_strides, out_f16_strides, out_f32_strides;

    // Whether sequences are the items of the batch, and keys, rows and blocks are few (see Place). All is tested at
    // once, so that one branch skips the code for other launches.
    __device__ bool are_dense(int block_rows) const {
        const auto bits = [](const int *array) { return reinterpret_cast<uintptr_t>(array); };
        return ((bits(query_starts) | bits(query_ends) | bits(key_starts) | bits(key_ends)) == 0) &
               ((uint32_t(keys) / split_unit | gridDim.x | gridDim.y * block_rows) < few);
    }

    // Whether anything but outputs is asked for, or anything but keys joins the sums.
    __device__ bool have_figures() const {
        const auto bits = [](const float *array) { return reinterpret_cast<uintptr_t>(array); };
        return (bits(sinks) | bits(lse) | bits(partial) | bits(row_max) | bits(row_sum)) != 0;
    }
};

// The options of an entry: the parameters that the lists above declare, row_shift, and the sizes from `batch` to
// `splits`.
#define ATTENTION_OPTIONS(row_shift, ...)                                                                              \
    op::AttentionOptions {                                                                                             \
        ATTENTION_ARRAYS(AS_ARGUMENT)                                                                                  \
        row_shift, ATTENTION_SCALARS(AS_ARGUMENT) __VA_ARGS__, ATTENTION_STRIDES(THE_STRIDES_MASK, THE_STRIDES_Q)      \
    }

// What a Problem begins with, and what else takes divisions to find: the queries of the block's rows, and the keys of a
// split.
struct Place {
    int batch, head, split, row_block, first_query, queries, first_key, keys;   // as in Problem
    int begin_query, last_query, split_keys;

    // In few instructions, for launches that are_dense().
    __device__ static Place of_dense(const AttentionOptions &options, uint3 block, int block_rows) {
        Place place{int(block.z), int(block.x), 0, int(gridDim.y - 1 - block.y), 0, options.queries, 0, options.keys};
        place.split_keys = options.keys;
        // Divisions are not moved to the beginning of the kernel, where other launches would pay for them.
        if (options.splits > 1) {
            const int splits = ptx::mov_b32(options.splits);
            place.split = quotient_of_few(block.x, ptx::mov_b32(options.heads_kv));
            place.head -= place.split * options.heads_kv;
            place.split_keys = split_unit * quotient_of_few(ceil_div(options.keys, split_unit) + splits - 1, splits);
        }
        const int first_row = place.row_block * block_rows,
                  last_row = min(first_row + block_rows, options.queries * options.group) - 1;
        place.begin_query = first_row, place.last_query = last_row;
        if (options.group != 1) {
            const int group = ptx::mov_b32(options.group);
            place.begin_query = quotient_of_few(first_row, group);
            place.last_query = quotient_of_few(last_row, group);
        }
        return place;
    }
};

// The part of a problem that one block computes: one sequence, one head of K and V with the heads of Q that share it,
// one split of the keys. Row r of the block's problem is query r / group of head r % group, so that one tile serves all
// heads that share K and V.
//
// Blocks start in the order of their numbers: first the last rows of all heads and splits, then the rows before them.
// Under a causal mask later rows see more keys, so the blocks that start last are the shortest.
struct Problem {
    const AttentionOptions &options;
    int batch, head, split;
    int row_block;              // index of the block's rows, in blocks
    int first_query, queries;   // of this sequence, in Q
    int first_key, keys;
    int rows;
    int first_offset, end_offset;   // query i sees the existing keys among i + first_offset .. i + end_offset - 1

    // block: this block's place in the grid.
    __device__ explicit Problem(const AttentionOptions &options, uint3 block) : options(options) {
        const int sequence = block.z;
        head = block.x % options.heads_kv;
        split = block.x / options.heads_kv;
        row_block = gridDim.y - 1 - block.y;
        batch = options.query_starts ? 0 : sequence;   // packed sequences are one batch
        first_query = options.query_starts ? options.query_starts[sequence] : 0;
        first_key = options.key_starts ? options.key_starts[sequence] : 0;
        queries = (options.query_ends ? options.query_ends[sequence] : options.queries) - first_query;
        keys = (options.key_ends ? options.key_ends[sequence] : options.keys) - first_key;
        find_rows();
    }

    // place: of this block.
    __device__ Problem(const AttentionOptions &options, const Place &place)
        : options(options), batch(place.batch), head(place.head), split(place.split), row_block(place.row_block),
          first_query(place.first_query), queries(place.queries), first_key(place.first_key), keys(place.keys) {
        find_rows();
    }

    __device__ void find_rows() {
        rows = queries * options.group;
        // An unlimited side is no wider than keys + queries, whose sum fits 32 bits (largest_keys).
        first_offset = keys - queries - min(options.left, keys);
        end_offset = keys - queries + min(options.right, queries - 1) + 1;
    }

    __device__ int query_of(int row) const { return options.group == 1 ? row : row / options.group; }
    __device__ int group_of(int row) const { return options.group == 1 ? 0 : row % options.group; }

    // A query sees the keys first_visible .. end_visible - 1; none if the end is not behind the start.
    __device__ int first_visible(int query) const { return max(query + first_offset, 0); }
    __device__ int end_visible(int query) const { return min(query + end_offset, keys); }

    // The sequence's first tile of keys in operands in tiles: no two packed sequences share a tile.
    __device__ int first_tile(int tile_keys) const {
        return options.key_starts ? first_unit(first_key, blockIdx.z, tile_keys) : 0;
    }

    // The sequence's first block of queries that share a mean, likewise.
    __device__ int first_block() const {
        return options.query_starts ? first_unit(first_query, blockIdx.z, smooth_queries) : 0;
    }

    // Whether scores need more than a factor before the softmax. If so, no tile is plain.
    __device__ bool transforms_scores() const {
        return options.mask || options.allowed || options.softcap > 0.0f || !(options.scale > 0.0f);
    }

    // Offsets of a row's elements in arrays with strides, and of rows in arrays without.
    __device__ size_t at(const StridesMask &strides, int query, int group, int key) const {
        return batch * strides.batch + head * strides.head + group * strides.group +
               (first_query + query) * strides.query + (first_key + key) * strides.key;
    }
    __device__ size_t at(const StridesQ &strides, int row) const { return at(strides, query_of(row), group_of(row)); }
    __device__ size_t at(const StridesQ &strides, int query, int group) const {
        return batch * strides.batch + head * strides.head + group * strides.group +
               (first_query + query) * strides.query;
    }
    __device__ size_t at(const StridesK &strides) const {
        return batch * strides.batch + head * strides.head + first_key * strides.key;
    }
    __device__ size_t row_at(int row) const {
        return (size_t(batch * options.heads_kv + head) * options.group + group_of(row)) * options.queries +
               first_query + query_of(row);
    }
    __device__ size_t split_row_at(int row) const {
        return size_t(split) * options.batch * options.heads_kv * options.group * options.queries + row_at(row);
    }
};

// The keys of a split: whole units.
__device__ inline int keys_of_split(const AttentionOptions &options) {
    const int split_units = ceil_div(ceil_div(options.keys, split_unit), options.splits);
    return split_units * split_unit;
}

// The tiles of `keys` keys of a block's loop: those in its split of which any row sees keys. In tiles plain_begin ..
// plain_end - 1 every row sees every key, and scores need only a factor.
template <int keys>
struct TileRange {
    int begin, end, plain_begin, plain_end;
    int first_query, last_query, split_end;

    __device__ TileRange(const Problem &problem, int first_row, int end_row)
        : first_query(problem.query_of(first_row)), last_query(problem.query_of(end_row - 1)) {
        find(problem, keys_of_split(problem.options));
        find_plain(problem);
    }

    // find_plain() is called later.
    __device__ TileRange(const Problem &problem, const Place &place)
        : first_query(place.begin_query), last_query(place.last_query) {
        find(problem, place.split_keys);
    }

    __device__ void find(const Problem &problem, int split_keys) {
        static_assert(split_unit % keys == 0, "a split begins where a tile does");
        const int split_begin = problem.split * split_keys;
        split_end = min(split_begin + split_keys, problem.keys);
        begin = max(problem.first_visible(first_query), split_begin) / keys;
        end = ceil_div(max(min(problem.end_visible(last_query), split_end), 0), keys);
        end = max(end, begin);
    }

    __device__ void find_plain(const Problem &problem) {
        plain_begin = min(max(ceil_div(problem.first_visible(last_query), keys), begin), end);
        plain_end = max(min(max(problem.end_visible(first_query), 0), split_end), 0) / keys;
        plain_end = max(min(plain_end, end), plain_begin);
        if (problem.transforms_scores()) plain_end = plain_begin;
    }
};

}   // namespace op
