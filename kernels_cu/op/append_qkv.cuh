// Processes the projection of an attention layer. Queries are normed, rotated and quantized; keys are normed, rotated
// and written to the pages of a cache; values are written there. Every step gives the bytes of the kernel that does it
// alone.
#pragma once

#include <cstdint>

#include "../ptx/barrier.cuh"
#include "../ptx/warp.cuh"
#include "append.cuh"
#include "rope.cuh"

namespace op {

// The formats of a cache, as numbered by a scalar.
enum class CacheFormat { bf16, f16, mxfp8, mxfp4, nvfp4 };

// The cache of keys or values, and how rows are stored in it.
struct CacheTarget {
    CacheRows rows;
    const float *mean, *global_scale;   // [heads_kv, dim] and [heads_kv] or null, as in NewRows
    int rule;

    // Stores a lane's share of a row if `stored`, with the bytes of append(). Called by the whole warp.
    __device__ void store(CacheFormat format, int64_t page, int64_t row, int head, int column, int cols, bool stored,
                          float (&values)[2][8]) const {
        if (mean && column < cols) {
#pragma unroll
            for (int i = 0; i < 16; ++i)
                if (column + i < cols) values[i / 8][i % 8] -= mean[head * cols + column + i];
        }
        const float scale = global_scale ? global_scale[head] : 1.0f;
        const auto at = [&](char *base, const PageStrides &strides) {
            return base + page * strides.page + head * strides.head + row * strides.token;
        };
        char *const codes = at(rows.codes, rows.code_strides), *const scales = at(rows.scales, rows.scale_strides);
        const auto plain = [&](auto element) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float eight[1][8];
#pragma unroll
                for (int j = 0; j < 8; ++j) eight[0][j] = values[i][j];
                PlainRow<decltype(element)>::template store<false>(eight, 0, scale, stored && column + 8 * i < cols,
                                                                   codes, nullptr, column + 8 * i, cols);
            }
        };
        if (format == CacheFormat::bf16) plain(__nv_bfloat16{});
        else if (format == CacheFormat::f16) plain(__half{});
        else if (format == CacheFormat::mxfp8)
            MxRow<tile::E4m3>::store<false>(values, rule, scale, stored, codes, scales, column, cols);
        else if (format == CacheFormat::mxfp4)
            MxRow<tile::E2m1>::store<false>(values, rule, scale, stored, codes, scales, column, cols);
        else Nvfp4Row::store<false>(values, rule, scale, stored, codes, scales, column, cols);
    }
};

// The parts of a projection.
template <class Element>
struct Projection {
    HeadRows<const Element> q, k, v;   // [tokens, heads or heads_kv, dim or dim_v]
    int64_t tokens;
    int heads, heads_kv, dim, dim_v;

    __device__ int of_token() const { return heads + 2 * heads_kv; }   // rows
};

// The norms of queries and keys, with weights [dim] each. Null weights: no norm.
struct HeadNorms {
    const float *q_weight, *k_weight;
    float eps;
};

// The output of queries: out[tokens, heads, dim], or quantized rows.
template <class Element>
struct QueryTarget {
    Element *out;
    QuantizedRows quantized;
};

// Keys and values go to slots[tokens] of `count`, as by append(). claims is null if every slot has one token. A block
// takes as many whole tokens as its lanes can hold, or one.
template <class Element>
__device__ inline void append_qkv(NormShared &shared, const Projection<Element> &x, const HeadNorms &norms,
                                  const Rotation &rotation, const int *positions, const QueryTarget<Element> &target,
                                  const long long *slots, int *claims, int64_t count, int page_rows, CacheFormat format,
                                  const CacheTarget &keys, const CacheTarget &values_to) {
    // The tokens of this block; rows_at_once of their rows are processed at a time.
    const NormLanes place(x.dim);
    const int rows_at_once = place.rows(), of_token = x.of_token();
    const int tokens_here = of_token < rows_at_once ? rows_at_once / of_token : 1;
    const int64_t first_token = int64_t(blockIdx.x) * tokens_here;
    const int shares = max(norm_shares, ceil_div(ceil_div(x.dim_v, produce_share), place.lanes));
    int turn = 0;
#pragma unroll 1
    for (int first = 0; first < tokens_here * of_token; first += rows_at_once) {
        // This lane's row: of queries, keys or values; and its slot.
        const int unit = first + place.row(), head_of_all = unit % of_token;
        const int64_t token = first_token + unit / of_token;
        const bool present = unit < tokens_here * of_token && token < x.tokens;
        const bool is_query = head_of_all < x.heads, is_key = !is_query && head_of_all < x.heads + x.heads_kv;
        const int head = is_query ? head_of_all : (head_of_all - x.heads) % x.heads_kv;
        const int cols = is_query || is_key ? x.dim : x.dim_v;
        const Element *source = is_query ? x.q.row(token, head) : is_key ? x.k.row(token, head) : x.v.row(token, head);
        const long long slot = present && !is_query ? slots[token] : -1;
        const bool stored = is_slot(slot, count) && (!claims || claims[slot] == token);
#pragma unroll 1
        for (int share = 0; share < shares; share += norm_shares) {
            // Load its shares.
            HeadShares values;
            RowShares<Element, norm_shares> raw;
            raw.load(source, present, place.column(share), place.lanes * produce_share, cols);
#pragma unroll
            for (int i = 0; i < norm_shares; ++i) raw.unpack(i, values[i]);
            if (share == 0) {
                // Norm and rotate queries and keys; their rows have no shares beyond these.
                const float *weight = is_query ? norms.q_weight : is_key ? norms.k_weight : nullptr;
                float factor = 1.0f;
                if (norms.q_weight || norms.k_weight) {   // the same sums as norm_rows()
                    float2 sums = {};
#pragma unroll
                    for (int i = 0; i < norm_shares; ++i)
#pragma unroll
                        for (int j = 0; j < 8; ++j) {
                            sums.x = fmaf(values[i][0][j], values[i][0][j], sums.x);
                            sums.y = fmaf(values[i][1][j], values[i][1][j], sums.y);
                        }
                    const float squares =
                        row_sums<false>(shared, turn, place.lanes, {sums.x + sums.y, 0.0f}).x / float(x.dim);
                    factor = 1.0f / sqrtf(squares + norms.eps);
                }
                const auto normed = [&](float value, float of_weight) {
                    return rounded<Element>(value * factor * (of_weight + 0.0f));
                };
                if (weight) {
#pragma unroll
                    for (int i = 0; i < 2 * norm_shares; ++i) {
                        const int column = place.column(i / 2) + i % 2 * 8;
                        if (column >= cols) continue;
                        float weights[1][8];
                        load_share(weight + column, cols - column, weights);
#pragma unroll
                        for (int j = 0; j < 8; ++j) {
                            float &value = values[i / 2][i % 2][j];
                            value = normed(value, weights[0][j]);
                        }
                    }
                }
                if (present && (is_query || is_key)) {
                    rotation.turn(
                        place, 0, cols, positions[token], values,
                        [&](int column, float (&others)[8]) {
                            float some[1][8], weights[1][8];
                            load_share(source + column, 8, some);
                            if (weight) load_share(weight + column, 8, weights);
#pragma unroll
                            for (int i = 0; i < 8; ++i)
                                others[i] = weight ? normed(some[0][i], weights[0][i]) : some[0][i];
                        },
                        [&](int column) {
                            const float value = float(source[column]);
                            return weight ? normed(value, weight[column]) : value;
                        });
#pragma unroll
                    for (int i = 0; i < norm_shares * 16; ++i) {
                        float &value = values[i / 16][i / 8 % 2][i % 8];
                        value = rounded<Element>(value);
                    }
                }
            }
            // Store queries, and write keys and values to the cache.
            const bool queries = ptx::vote_sync_any(present && is_query);
            const bool writes = ptx::vote_sync_any(stored);
            const int64_t page = stored ? slot / page_rows : 0, row = stored ? slot - page * page_rows : 0;
#pragma unroll 1
            for (int i = 0; i < norm_shares; ++i) {
                const int column = place.column(share + i);
                float (&some)[2][8] = values[0];
                if (queries && target.out && present && is_query && column < cols)
                    store_share(target.out + (token * x.heads + head) * cols + column, cols - column, some);
                if (queries && !target.out) {
                    float copy[2][8];
#pragma unroll
                    for (int j = 0; j < 16; ++j) copy[j / 8][j % 8] = some[j / 8][j % 8];
                    target.quantized.store(token * x.heads + head, column, x.dim, present && is_query, copy);
                }
                if (writes) {
                    const CacheRows &k = keys.rows, &v = values_to.rows;
                    const auto strides = [is_key](const PageStrides &of_k, const PageStrides &of_v) {
                        return PageStrides{is_key ? of_k.page : of_v.page, is_key ? of_k.head : of_v.head,
                                           is_key ? of_k.token : of_v.token};
                    };
                    const CacheTarget here = {
                        {is_key ? k.codes : v.codes, is_key ? k.scales : v.scales,
                         strides(k.code_strides, v.code_strides), strides(k.scale_strides, v.scale_strides)},
                        is_key ? keys.mean : nullptr,
                        is_query ? nullptr
                        : is_key ? keys.global_scale
                                 : values_to.global_scale,
                        is_key ? keys.rule : values_to.rule};
                    here.store(format, page, row, head, column, cols, stored && column < cols, some);
                }
#pragma unroll
                for (int j = 0; j < 16; ++j) some[j / 8][j % 8] = values[1][j / 8][j % 8];
            }
        }
    }
    // Remove the claims of the block's tokens.
    if (!claims) return;
    ptx::bar_sync();   // all threads have read the claims of this block's tokens
    const int64_t token = first_token + threadIdx.x;
    if (int(threadIdx.x) >= tokens_here || token >= x.tokens) return;
    const long long slot = slots[token];
    if (is_slot(slot, count) && claims[slot] == token) claims[slot] = unclaimed;
}

}   // namespace op
