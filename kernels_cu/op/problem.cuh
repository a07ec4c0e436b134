// One problem of attention: what an entry is given, which rows a block has, and which keys each row sees.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "../kernel.cuh"
#include "../ptx/cvt.cuh"
#include "../ptx/math.cuh"
#include "../ptx/warp.cuh"
#include "sequences.cuh"

namespace op {

constexpr float log2_e = 1.4426950408889634f, ln_2 = 0.6931471805599453f;

// Keys to a unit of splitting: every tile size divides it, so that a split begins where a tile does.
constexpr int split_unit = 64;

// Neighbouring queries of a head that share a mean where queries are smoothed.
constexpr int smooth_queries = 64;

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

// What an attention entry is given beside its operands, in the order of its parameters. Arrays that are not there are null.
struct AttentionOptions {
    const float *mask;              // added to the scaled scores
    const uint8_t *allowed;         // 0 hides a key
    const float *sinks;             // [heads_kv, group]: one logit per head that joins the denominator
    const float *row_shift;         // [batch, heads_kv, group, queries]: what the scaled scores of a row lack, all alike
    const int *query_starts, *query_ends, *key_starts, *key_ends;   // [sequences]
    __nv_bfloat16 *out_bf16;        // [batch, heads_kv, group, queries, dim_v]
    __half *out_f16;
    float *out_f32;
    float *lse;                     // [batch, heads_kv, group, queries]
    float *partial;                 // [splits, batch, heads_kv, group, queries, dim_v], not divided by row_sum
    float *row_max, *row_sum;       // [splits, batch, heads_kv, group, queries]; row_max in units of log2
    float scale, softcap;
    int left, right;                // query i sees key j if -left <= j - (i + keys - queries) <= right
    int batch, heads_kv, group, queries, dim, keys, dim_v, sequences, splits;
    StridesMask mask_strides, allowed_strides;
    StridesQ out_bf16_strides, out_f16_strides, out_f32_strides;
};

// The parameters of every attention entry behind its operands, in order, and the options made of them: arguments, then axes,
// then strides (those of q, k and v before those here).
#define ATTENTION_ARRAYS                                                                                                    \
    const float *mask, const uint8_t *allowed, const float *sinks, const int *query_starts, const int *query_ends,          \
        const int *key_starts, const int *key_ends, __nv_bfloat16 *out_bf16, __half *out_f16, float *out_f32, float *lse,   \
        float *partial, float *row_max, float *row_sum
#define ATTENTION_SCALARS float scale, float softcap, int left, int right
#define STRIDES_Q(array) long long array##_batch, long long array##_head, long long array##_group, long long array##_query
#define STRIDES_K(array) long long array##_batch, long long array##_head, long long array##_key
#define STRIDES_MASK(array) STRIDES_Q(array), long long array##_key
#define ATTENTION_STRIDES STRIDES_MASK(mask), STRIDES_MASK(allowed), STRIDES_Q(out_bf16), STRIDES_Q(out_f16), STRIDES_Q(out_f32)

#define THE_STRIDES_Q(array) {array##_batch, array##_head, array##_group, array##_query}
#define THE_STRIDES_K(array) {array##_batch, array##_head, array##_key}
#define THE_STRIDES_MASK(array) {array##_batch, array##_head, array##_group, array##_query, array##_key}
#define ATTENTION_OPTIONS                                                                                                   \
    {mask, allowed, sinks, row_shift, query_starts, query_ends, key_starts, key_ends, out_bf16, out_f16, out_f32, lse,      \
     partial, row_max, row_sum, scale, softcap, left, right, batch, heads_kv, group, queries, dim, keys, dim_v, sequences,  \
     splits,                                                                                                                \
     THE_STRIDES_MASK(mask), THE_STRIDES_MASK(allowed), THE_STRIDES_Q(out_bf16), THE_STRIDES_Q(out_f16), THE_STRIDES_Q(out_f32)}

// The part of a problem that one block works on: one sequence, one head of K and V with the heads of Q that share it, one
// split of the keys. Row r of the block's problem is query r / group of head r % group, so that all heads that share K and
// V meet in a tile.
//
// Blocks start in the order of their numbers: those of all heads and splits with the last rows, then those before them. Where a
// mask is causal, later rows have more to do, so that the blocks that start last are short ones.
struct Problem {
    const AttentionOptions &options;
    int batch, head, split;
    int row_block;              // the block's rows, counted in blocks
    int first_query, queries;   // of this sequence: rows of Q from first_query on
    int first_key, keys;
    int rows;
    int first_offset, end_offset;   // query i sees keys i + first_offset .. i + end_offset - 1, of those that are there

    // block: this block's place in the grid.
    __device__ explicit Problem(const AttentionOptions &options, uint3 block) : options(options) {
        const int sequence = block.z;
        head = block.x % options.heads_kv;
        split = block.x / options.heads_kv;
        row_block = gridDim.y - 1 - block.y;
        batch = options.query_starts ? 0 : sequence;   // packed sequences stand in one
        first_query = options.query_starts ? options.query_starts[sequence] : 0;
        first_key = options.key_starts ? options.key_starts[sequence] : 0;
        queries = (options.query_ends ? options.query_ends[sequence] : options.queries) - first_query;
        keys = (options.key_ends ? options.key_ends[sequence] : options.keys) - first_key;
        rows = queries * options.group;
        // An open side is as wide as it can matter, so that no sum exceeds 32 bits: keys + queries do not (largest_keys).
        first_offset = keys - queries - min(options.left, keys);
        end_offset = keys - queries + min(options.right, queries - 1) + 1;
    }

    __device__ int query_of(int row) const { return options.group == 1 ? row : row / options.group; }
    __device__ int group_of(int row) const { return options.group == 1 ? 0 : row % options.group; }

    // The keys that a query sees: from first_visible to before end_visible; the end may lie before the start.
    __device__ int first_visible(int query) const { return max(query + first_offset, 0); }
    __device__ int end_visible(int query) const { return min(query + end_offset, keys); }

    // The sequence's first tile of keys among those of operands in tiles: packed sequences have tiles of their own.
    __device__ int first_tile(int tile_keys) const { return options.key_starts ? first_unit(first_key, blockIdx.z, tile_keys) : 0; }

    // Its first block of queries that share a mean, likewise.
    __device__ int first_block() const { return options.query_starts ? first_unit(first_query, blockIdx.z, smooth_queries) : 0; }

    // Whether scores need more than a factor before the softmax; then no tile is plain.
    __device__ bool transforms_scores() const {
        return options.mask || options.allowed || options.softcap > 0.0f || !(options.scale > 0.0f);
    }

    // Where elements of a row stand in the arrays with strides, and rows in those without.
    __device__ size_t at(const StridesMask &strides, int query, int group, int key) const {
        return batch * strides.batch + head * strides.head + group * strides.group + (first_query + query) * strides.query +
               (first_key + key) * strides.key;
    }
    __device__ size_t at(const StridesQ &strides, int row) const { return at(strides, query_of(row), group_of(row)); }
    __device__ size_t at(const StridesQ &strides, int query, int group) const {
        return batch * strides.batch + head * strides.head + group * strides.group + (first_query + query) * strides.query;
    }
    __device__ size_t at(const StridesK &strides) const {
        return batch * strides.batch + head * strides.head + first_key * strides.key;
    }
    __device__ size_t row_at(int row) const {
        return (size_t(batch * options.heads_kv + head) * options.group + group_of(row)) * options.queries + first_query +
               query_of(row);
    }
    __device__ size_t split_row_at(int row) const {
        return size_t(split) * options.batch * options.heads_kv * options.group * options.queries + row_at(row);
    }
};

// The tiles of `keys` keys that a block goes through: those that any of its rows sees, in its split. From plain_begin to
// plain_end every row sees every key and the scores need no more than a factor.
template <int keys>
struct TileRange {
    int begin, end, plain_begin, plain_end;

    __device__ TileRange(const Problem &problem, int first_row, int end_row) {
        static_assert(split_unit % keys == 0, "a split begins where a tile does");
        const int first_query = problem.query_of(first_row), last_query = problem.query_of(end_row - 1);
        const int split_keys = ceil_div(ceil_div(problem.options.keys, split_unit), problem.options.splits) * split_unit;
        const int split_begin = problem.split * split_keys, split_end = min(split_begin + split_keys, problem.keys);
        begin = max(problem.first_visible(first_query), split_begin) / keys;
        end = ceil_div(max(min(problem.end_visible(last_query), split_end), 0), keys);
        end = max(end, begin);
        plain_begin = min(max(ceil_div(problem.first_visible(last_query), keys), begin), end);
        plain_end = max(min(max(problem.end_visible(first_query), 0), split_end), 0) / keys;
        plain_end = max(min(plain_end, end), plain_begin);
        if (problem.transforms_scores()) plain_end = plain_begin;
    }
};

}  // namespace op
