// Processes the projection of an attention layer. Queries are normed, rotated and quantized; keys are normed, rotated
// and written to the pages of a cache; values are written there. Every step gives the bytes of the kernel that does it
// alone.
#pragma once

#include <cstdint>

#include "../ptx/barrier.cuh"
#include "../ptx/warp.cuh"
#include "append.cuh"
#include "early.cuh"
#include "rope.cuh"

namespace op {

// The formats of a cache, as numbered by a scalar.
enum class CacheFormat { bf16, f16, mxfp8, mxfp4, nvfp4 };

// The cache of keys or values, and how rows are stored in it.
struct CacheTarget {
    CacheRows rows;
    const float *mean, *global_scale;   // [heads_kv, dim] and [heads_kv] or null, as in NewRows
    int rule;

    __device__ char *codes(int64_t page, int64_t row, int head) const {
        const PageStrides &strides = rows.code_strides;
        return rows.codes + page * strides.page + head * strides.head + row * strides.token;
    }

    // Stores a lane's share of a row if `stored`, with the bytes of append(). Called by the whole warp.
    __device__ void store(CacheFormat format, int64_t page, int64_t row, int head, int column, int cols, bool stored,
                          float (&values)[2][8]) const {
        if (mean && stored) {
#pragma unroll
            for (int i = 0; i < 16; ++i)
                if (column + i < cols) values[i / 8][i % 8] -= mean[head * cols + column + i];
        }
        const float scale = global_scale && stored ? global_scale[head] : 1.0f;
        const PageStrides &strides = rows.scale_strides;
        char *const codes = this->codes(page, row, head);
        char *const scales = rows.scales + page * strides.page + head * strides.head + row * strides.token;
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

// The cache of keys or of values, selected by lane.
__device__ inline CacheTarget target_of(bool is_key, const CacheTarget &keys, const CacheTarget &values) {
    const CacheRows &k = keys.rows, &v = values.rows;
    const auto strides = [is_key](const PageStrides &of_k, const PageStrides &of_v) {
        return PageStrides{is_key ? of_k.page : of_v.page, is_key ? of_k.head : of_v.head,
                           is_key ? of_k.token : of_v.token};
    };
    return {{is_key ? k.codes : v.codes, is_key ? k.scales : v.scales, strides(k.code_strides, v.code_strides),
             strides(k.scale_strides, v.scale_strides)},
            is_key ? keys.mean : values.mean,
            is_key ? keys.global_scale : values.global_scale,
            is_key ? keys.rule : values.rule};
}

// The factor of RMS normalization of a head whose `cols` values `lanes` lanes hold, from the same sums as norm_rows().
// Called by all threads of the block.
__device__ inline float head_factor(const HeadShares &values, NormShared &shared, int &turn, int lanes, int cols,
                                    float eps) {
    float2 sums = {};
#pragma unroll
    for (int i = 0; i < norm_shares; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            sums.x = fmaf(values[i][0][j], values[i][0][j], sums.x);
            sums.y = fmaf(values[i][1][j], values[i][1][j], sums.y);
        }
    const float squares = row_sums<false>(shared, turn, lanes, {sums.x + sums.y, 0.0f}).x / float(cols);
    return 1.0f / sqrtf(squares + eps);
}

// The tokens of a block and all that is done with them. Keys and values go to slots[tokens] of `count`, as by append().
// claims is null if every slot has one token.
template <class Element>
struct QkvTokens {
    Projection<Element> x;
    HeadNorms norms;
    Rotation rotation;
    const int *positions;
    QueryTarget<Element> target;
    const long long *slots;
    int *claims;
    int64_t count;
    int page_rows;
    CacheFormat format;
    CacheTarget keys, values_to;
    int first_token, tokens_here;
};

// A lane's row of a projection. unit: token and row of it, counted from the block's first token.
struct ProjectionRow {
    int token, head;   // of queries, of keys, or of values
    bool present, is_query, is_key;

    template <class Element>
    __device__ ProjectionRow(const Projection<Element> &x, int first_token, int tokens_here, const HeadOf &unit) {
        const int in_block = unit.token, of_all = unit.head;
        token = first_token + in_block;
        present = in_block < tokens_here && token < x.tokens;
        is_query = of_all < x.heads, is_key = !is_query && of_all < x.heads + x.heads_kv;
        head = is_query ? of_all : is_key ? of_all - x.heads : of_all - x.heads - x.heads_kv;
    }

    template <class Element>
    __device__ const Element *source(const Projection<Element> &x) const {
        return is_query ? x.q.row(token, head) : is_key ? x.k.row(token, head) : x.v.row(token, head);
    }
};

// The page of a slot and the row in it. Quotients of 64 bits take long; few caches need them.
struct SlotPlace {
    int64_t page;
    int row;

    __device__ SlotPlace(long long slot, long long count, int page_rows) {
        if (count >> 32) page = slot / page_rows;
        else page = unsigned(slot) / unsigned(page_rows);
        row = slot - page * page_rows;
    }
};

// The rows of a block's tokens where all heads have one dimension, the rotation is of all_columns(), rows and weights
// are whole, and queries are stored, and keys and values written, as they are, in Element's type. Each step gives the
// bytes of append_any().
//
// A token has one or several warps, so that its slot and its angles are taken once. A thread has eight columns of a row
// and the eight that lie half a row behind them, which are the pairs of a rotation by halves. Rows are copied to shared
// memory while those before are processed.
template <class Element>
__device__ inline void append_plain(NormRowsShared &shared, const QkvTokens<Element> &of) {
    const auto &[x, norms, rotation, positions, target, slots, claims, count, page_rows, format, keys, values_to,
                 first_token, tokens_here] = of;
    constexpr int log_warps = 3, stages = KeptRows::chunks / 2;
    static_assert(produce_threads == 32 << log_warps);
    const int half = x.dim / 2, threads = x.dim / 16, power = 31 - __clz(threads);   // threads of a row: at most 32
    const int of_token = x.of_token(), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // Teams of warps: each has every teams-th token, and as many rows of it at once as it has threads for.
    const int log_teams = min(32 - __clz(tokens_here - 1), log_warps), log_team = log_warps - log_teams;
    const int teams = 1 << log_teams, at_once = 32 << log_team >> power;
    const int begin = (warp & ((1 << log_team) - 1)) * 32 >> power, mine = lane >> power;   // this warp's, this lane's
    const int column = 8 * (lane & (threads - 1)), end = min(first_token + tokens_here, int(x.tokens));
    int token = first_token + (warp >> log_team);
    wait_for_launches_ahead();
    if (token >= end) return;
    // The position and the slot of the next token are in flight while rows of this one are processed.
    int next_position = positions[token];
    long long next_slot = slots[token];
    // Starts copying the next row to shared memory, after the last one of a token the first one of the next token. A
    // lane without a row takes the last one.
    const char *const raw = reinterpret_cast<const char *>(&shared.kept.chunk[0][threadIdx.x]);
    const uint32_t kept = static_cast<uint32_t>(__cvta_generic_to_shared(raw));
    constexpr int chunk_bytes = sizeof(shared.kept.chunk[0]), stage_bytes = 2 * chunk_bytes;
    const int k_end = x.heads + x.heads_kv;
    int ahead_token = token, ahead_first = begin, ahead_stage = 0,
        ahead_end = 0;   // the end of queries, keys or values
    const Element *from = nullptr;
    int64_t from_step = 0;
    const auto start = [&] {
        if (ahead_token < end) {
            if (ahead_first + mine >= ahead_end) {
                const int row = min(ahead_first + mine, of_token - 1);
                const auto find = [&](const HeadRows<const Element> &rows, int first, int last) {
                    from = rows.row(ahead_token, row - first) + column;
                    from_step = at_once * rows.head_stride, ahead_end = last;
                };
                if (row < x.heads) find(x.q, 0, x.heads);
                else if (row < k_end) find(x.k, x.heads, k_end);
                else find(x.v, k_end, of_token);
            } else {
                from += from_step;
            }
            ptx::cp_async_ca<16>(kept + ahead_stage, from, 16);
            ptx::cp_async_ca<16>(kept + ahead_stage + chunk_bytes, from + half, 16);
        }
        ptx::cp_async_commit_group();
        ahead_stage = (ahead_stage + stage_bytes) & (stages * stage_bytes - 1);
        ahead_first += at_once;
        if (ahead_first >= of_token) ahead_first = begin, ahead_end = 0, ahead_token += teams;
    };
#pragma unroll
    for (int i = 0; i < stages - 1; ++i) start();
    float weights[2][8];
    int stage = 0;
#pragma unroll 1
    for (; token < end; token += teams) {
        const Rotation::Turn turn = rotation.of_columns(next_position, column);
        const long long slot = next_slot;
        const bool has_slot = is_slot(slot, count);
        const int claim = has_slot && claims ? claims[slot] : token;
        if (token + teams < end) next_position = positions[token + teams], next_slot = slots[token + teams];
        // Where rows go to: found anew for queries, for keys, and for values.
        const bool stored = has_slot && claim == token;
        const SlotPlace place(stored ? slot : 0, count, page_rows);
        const float *weight = nullptr;
        bool turns = false, writes = false;
        int to_end = 0;
        Element *to = nullptr;
        int64_t to_step = 0;
#pragma unroll 1
        for (int first = begin; first < of_token; first += at_once, to += to_step) {
            const int row = first + mine;
            if (row >= to_end) {
                const auto find = [&](char *rows, int64_t stride, const float *weight_of, int begin, int last) {
                    to = reinterpret_cast<Element *>(rows + (row - begin) * stride) + column;
                    to_step = at_once * stride / int(sizeof(Element));
                    weight = weight_of, to_end = last;
                };
                const auto of_cache = [&](const CacheTarget &cache, const float *weight_of, int begin, int last) {
                    find(cache.codes(place.page, place.row, 0), cache.rows.code_strides.head, weight_of, begin, last);
                };
                if (row < x.heads)
                    find(reinterpret_cast<char *>(target.out + int64_t(token) * x.heads * x.dim),
                         x.dim * int(sizeof(Element)), norms.q_weight, 0, x.heads);
                else if (row < k_end) of_cache(keys, norms.k_weight, x.heads, k_end);
                else of_cache(values_to, nullptr, k_end, of_token);
                turns = row < k_end, writes = row < x.heads || (stored && row < of_token);
#pragma unroll
                for (int i = 0; i < 2 && weight; ++i) {
                    tile::Eight<float> eight;
                    eight.load(weight + column + i * half);
                    eight.unpack(weights[i]);
#pragma unroll
                    for (float &one : weights[i]) one += 0.0f;   // as rmsnorm's offset
                }
            }
            ptx::cp_async_wait_group<stages - 2>();
            float values[2][8];
#pragma unroll
            for (int i = 0; i < 2; ++i)
                tile::unpack(*reinterpret_cast<const uint4 *>(raw + stage + i * chunk_bytes), values[i], Element{});
            stage = (stage + stage_bytes) & (stages * stage_bytes - 1);
            start();
            if (norms.q_weight || norms.k_weight) {
                float squares = 0.0f;
#pragma unroll
                for (int i = 0; i < 16; ++i) squares = fmaf(values[i / 8][i % 8], values[i / 8][i % 8], squares);
#pragma unroll
                for (int mask = 1; mask < 32; mask *= 2)
                    if (mask < threads) squares += ptx::shfl_sync_bfly_f32(squares, mask);
                // The dimension is a power of two: the product is the quotient.
                const float factor = 1.0f / sqrtf(squares * (1.0f / x.dim) + norms.eps);
                if (weight) {
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
#pragma unroll
                        for (int j = 0; j < 8; ++j) values[i][j] = values[i][j] * factor * weights[i][j];
                        tile::unpack(tile::pack(values[i], Element{}), values[i], Element{});
                    }
                }
            }
            if (turns) turn(values);
            if (!writes) continue;
            tile::store(to, tile::pack(values[0], Element{}));
            tile::store(to + half, tile::pack(values[1], Element{}));
        }
    }
}

// The rows of a block's tokens where all heads have one dimension, the rotation is straight(), and rows and weights
// are whole. Each step gives the bytes of append_any(). The next rows are copied to shared memory while these are
// processed.
template <class Element>
__device__ inline void append_straight(NormRowsShared &shared, const QkvTokens<Element> &of) {
    const auto &[x, norms, rotation, positions, target, slots, claims, count, page_rows, format, keys, values_to,
                 first_token, tokens_here] = of;
    static_assert(2 * norm_shares <= KeptRows::shares<Element>, "two rows fit");
    const NormLanes place(x.dim);
    const int end = tokens_here * x.of_token(), cols = x.dim;
    int kept = 0;   // the first share of the kept row: 0 or norm_shares
    const auto begin = [&](const ProjectionRow &row, int kept) {
        if (row.present) {
            const Element *source = row.source(x);
#pragma unroll
            for (int i = 0; i < norm_shares; ++i) shared.kept.begin(kept + i, source + place.column(i));
        }
        ptx::cp_async_commit_group();
    };
    const HeadOf move(place.rows(), x.of_token());
    HeadOf unit(place.row(), x.of_token());
    const auto move_on = [&] {
        unit.move_on(move, x.of_token());
        return ProjectionRow(x, first_token, tokens_here, unit);
    };
    const auto turns = [](const ProjectionRow &row) { return row.present && (row.is_query || row.is_key); };
    const auto position_of = [&](const ProjectionRow &row) { return turns(row) ? positions[row.token] : 0; };
    Rotation::Angles angles;
    const auto begin_angles = [&](const ProjectionRow &row, int position) {
        if (turns(row)) rotation.begin(place, position, angles);
    };
    ProjectionRow next(x, first_token, tokens_here, unit);
    begin(next, kept);
    int next_position = position_of(next);
    int turn = 0;
#pragma unroll 1
    for (int first = 0; first < end; first += place.rows()) {
        const ProjectionRow row = next;
        next = move_on();
        const int position = next_position;
        next_position = position_of(next);   // in flight meanwhile, as `claim`
        begin_angles(row, position);
        const long long slot = row.present && !row.is_query ? slots[row.token] : -1;
        const bool has_slot = is_slot(slot, count);
        const int claim = has_slot && claims ? claims[slot] : row.token;
        ptx::cp_async_wait_group<0>();
        kept ^= norm_shares;
        begin(next, kept);
        HeadShares values = {};
        if (row.present) {
#pragma unroll
            for (int i = 0; i < norm_shares; ++i) shared.kept.get<Element>((kept ^ norm_shares) + i, values[i]);
        }
        // Norm and rotate queries and keys.
        if (norms.q_weight || norms.k_weight) {
            const float factor = head_factor(values, shared.sums, turn, place.lanes, cols, norms.eps);
            const float *weight = row.is_query ? norms.q_weight : row.is_key ? norms.k_weight : nullptr;
            if (weight) {
#pragma unroll
                for (int i = 0; i < norm_shares; ++i) {
                    RowShares<float, 1> raw;
                    float weights[2][8];
                    raw.template load<true>(weight + place.column(i), 0, 0, 1);
                    raw.unpack(0, weights);
#pragma unroll
                    for (int j = 0; j < 16; ++j) {
                        float &value = values[i][j / 8][j % 8];
                        value = value * factor * (weights[j / 8][j % 8] + 0.0f);
                    }
                    round_values<Element>(values[i]);
                }
            }
        }
        if (turns(row)) {
            rotation.turn_halves(angles, values);
#pragma unroll
            for (int i = 0; i < norm_shares; ++i) round_values<Element>(values[i]);
        }
        // Store queries, and write keys and values to the cache.
        const bool stored = has_slot && claim == row.token;
        const SlotPlace at(stored ? slot : 0, count, page_rows);
        const CacheTarget here = target_of(row.is_key, keys, values_to);
        const int64_t query = int64_t(row.token) * x.heads + row.head;
        const bool queries = ptx::vote_sync_any(row.present && row.is_query), writes = ptx::vote_sync_any(stored);
#pragma unroll 1
        for (int i = 0; i < norm_shares; ++i) {
            const int column = place.column(i);
            const bool asks = row.present && row.is_query;
            if (target.out && asks) store_values<true>(target.out + query * cols + column, cols, values[0]);
            if (queries && !target.out) target.quantized.store(query, column, cols, asks, values[0]);
            if (writes) here.store(format, at.page, at.row, row.head, column, cols, stored, values[0]);
#pragma unroll
            for (int j = 0; j < 16; ++j) values[0][j / 8][j % 8] = values[1][j / 8][j % 8];
        }
    }
}

// The rows of a block's tokens, of any dimensions and alignment.
template <class Element>
__device__ inline void append_any(NormRowsShared &shared, const QkvTokens<Element> &of) {
    const auto &[x, norms, rotation, positions, target, slots, claims, count, page_rows, format, keys, values_to,
                 first_token, tokens_here] = of;
    const NormLanes place(x.dim);
    const int rows_at_once = place.rows(), of_token = x.of_token();
    const int shares = max(norm_shares, ceil_div(ceil_div(x.dim_v, produce_share), place.lanes));
    int turn = 0;
#pragma unroll 1
    for (int first = 0; first < tokens_here * of_token; first += rows_at_once) {
        // This lane's row, and its slot.
        const ProjectionRow lane_row(x, first_token, tokens_here, HeadOf(first + place.row(), of_token));
        const int64_t token = lane_row.token;
        const int head = lane_row.head;
        const bool present = lane_row.present, is_query = lane_row.is_query, is_key = lane_row.is_key;
        const int cols = is_query || is_key ? x.dim : x.dim_v;
        const Element *source = lane_row.source(x);
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
                if (norms.q_weight || norms.k_weight) {
                    factor = head_factor(values, shared.sums, turn, place.lanes, x.dim, norms.eps);
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
            const SlotPlace at(stored ? slot : 0, count, page_rows);
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
                    const CacheTarget here = target_of(is_key, keys, values_to);
                    here.store(format, at.page, at.row, head, column, cols, stored && column < cols, some);
                }
#pragma unroll
                for (int j = 0; j < 16; ++j) some[j / 8][j % 8] = values[1][j / 8][j % 8];
            }
        }
    }
}

// Blocks divide the tokens evenly.
template <class Element>
__device__ inline void append_qkv(NormRowsShared &shared, QkvTokens<Element> of) {
    const Projection<Element> &x = of.x;
    const int tokens_here = ceil_div(int(x.tokens), int(gridDim.x)), first_token = blockIdx.x * tokens_here;
    of.tokens_here = tokens_here, of.first_token = first_token;
    const auto whole = [&x](const HeadRows<const Element> &rows) {
        return is_whole_rows(rows.first, rows.token_stride | rows.head_stride, x.dim);
    };
    const NormLanes place(x.dim);
    const bool whole_heads = x.dim == x.dim_v && whole(x.q) && whole(x.k) && whole(x.v) &&
                             is_chunk(of.norms.q_weight) && is_chunk(of.norms.k_weight);
    if constexpr (sizeof(Element) == 2) {
        const bool alike = of.format == (tile::is_bf16<Element> ? CacheFormat::bf16 : CacheFormat::f16) &&
                           of.target.out && !of.keys.mean && !of.keys.global_scale && !of.values_to.global_scale;
        const bool plain = whole_heads && alike && of.rotation.all_columns(place, x.dim) && place.lanes <= 16;
        if (!plain) wait_for_launches_ahead();
        if (plain) append_plain(shared, of);
        else if (whole_heads && of.rotation.straight(place, x.dim)) append_straight(shared, of);
        else append_any(shared, of);
    } else {
        wait_for_launches_ahead();
        append_any(shared, of);
    }
    // Remove the claims of the block's tokens.
    if (!of.claims) return;
    ptx::bar_sync();   // all threads have read the claims of this block's tokens
    for (int i = threadIdx.x; i < tokens_here; i += produce_threads) {
        const int token = first_token + i;
        const long long slot = token < x.tokens ? of.slots[token] : -1;
        if (is_slot(slot, of.count) && of.claims[slot] == token) of.claims[slot] = unclaimed;
    }
}

}   // namespace op
