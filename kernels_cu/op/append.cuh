// Writes rows of tokens to their slots in the pages of a cache, in its format.
//
// A slot is page * page size + row. If several tokens have one slot, the first is written. Every token claims its slot
// with its number by an atomic minimum, and the warp that finds the number of its token in the claim writes the token.
// A call removes all of its claims, so their memory is initialized only once, with the cache.
#pragma once

#include <cstdint>

#include "../kernel.cuh"
#include "../ptx/warp.cuh"
#include "../tile/rows.cuh"
#include "ending.cuh"
#include "paged.cuh"
#include "rope.cuh"

namespace op {

constexpr int append_threads = 128, claim_threads = 128;
constexpr int append_tokens = append_threads / 32;   // of a block: one of each warp
constexpr int append_ahead_bytes = 64;               // that a lane loads before it uses the first value
constexpr int unclaimed = 0x7f7fffff;                // above every token; the bits of the largest float

__device__ inline bool is_slot(long long slot, long long slots) { return slot >= 0 && slot < slots; }

// claims[slots[token]] becomes the least token.
__device__ inline void claim_slots(const long long *slots, int *claims, int tokens, long long count) {
    const int token = blockIdx.x * claim_threads + threadIdx.x;
    if (token < tokens && is_slot(slots[token], count)) atomicMin(claims + slots[token], token);
}

// What is appended: x[tokens, heads, dim] in one of three types; the others are null.
struct NewRows {
    HeadRows<const __nv_bfloat16> bf16;
    HeadRows<const __half> f16;
    HeadRows<const float> f32;
    int dim;
    const float *mean;           // [heads, dim]: subtracted from each row, or null
    const float *global_scale;   // [heads]: divisors of rows, or null
};

// The cache: codes[pages, heads, page, bytes] and scales[pages, heads, page, blocks], as bytes.
struct CacheRows {
    char *codes, *scales;
    PageStrides code_strides, scale_strides;
};

// Divides values by the global scale. Most caches have none, which saves divisions of ten instructions each.
template <int groups>
__device__ inline void divide(float (&values)[groups][8], float global_scale) {
    if (global_scale == 1.0f) return;
#pragma unroll
    for (auto &group : values)
#pragma unroll
        for (float &value : group) value = value / global_scale;
}

// How a lane's share of a row is stored, by format: `groups` times eight values, from `column` on.
template <class Element>
struct PlainRow {
    static constexpr int groups = 1;
    // whole: rows are multiples of eight values. They begin at multiples of 16 bytes.
    template <bool whole>
    __device__ static void store(float (&values)[1][8], int rule, float global_scale, bool present, char *codes, char *,
                                 int column, int columns) {
        divide(values, global_scale);
        Element *target = reinterpret_cast<Element *>(codes) + column;
        if constexpr (whole) {
            if (present) tile::store(target, tile::pack(values[0], Element{}));
        } else if (present) {
            store_share(target, columns - column, values);
        }
    }
};

template <int bits, int block, int groups>
__device__ inline void store_quantized(const tile::LaneCodes<bits, groups> &share, uint32_t scale, char *codes,
                                       char *scales, int column) {
    uint32_t *target = reinterpret_cast<uint32_t *>(codes + column * bits / 8);
    if constexpr (bits == 4) tile::store(target, uint2{share.word[0], share.word[1]});
    else tile::store(target, uint4{share.word[0], share.word[1], share.word[2], share.word[3]});
    if (column % block == 0) scales[column / block] = scale;
}

template <class Format>
struct MxRow {
    static constexpr int groups = 2;
    template <bool>
    __device__ static void store(float (&values)[2][8], int rule, float global_scale, bool present, char *codes,
                                 char *scales, int column, int) {
        divide(values, global_scale);
        tile::LaneCodes<Format::bits, 2> share;
        const uint32_t scale = encode_share<Format>(values, tile::ScaleRule(rule), share);
        if (present) store_quantized<Format::bits, tile::mx_block>(share, scale, codes, scales, column);
    }
};

struct Nvfp4Row {
    static constexpr int groups = 2;
    template <bool>
    __device__ static void store(float (&values)[2][8], int rule, float global_scale, bool present, char *codes,
                                 char *scales, int column, int) {
        const tile::Nvfp4Global global(global_scale);
        tile::LaneCodes<4, 2> share;
        uint32_t scale;
        tile::with_nvfp4_rule(
            rule, [&](auto better_of_two) { scale = encode_nvfp4_share<better_of_two>(values, global, share); });
        if (present) store_quantized<4, tile::nvfp4_block>(share, scale, codes, scales, column);
    }
};

// Keys or values: what is appended to them, and with which scale rule. None, if `cache.codes` is null.
struct AppendSide {
    NewRows rows;
    CacheRows cache;
    int rule;
};

// The token of a warp, and the page and row of its slot.
struct AppendToken {
    unsigned token, claim;   // the claim of the slot, in lane 0
    unsigned page, row;

    // Whether the token is the first of its slot. Called by the whole warp. Until it is called, the claim is in flight.
    __device__ bool is_first() const { return ptx::vote_sync_any(claim == token); }
};

// Appends the rows of a warp's token. A row has a power of two of lanes, so that a lane has the same columns in all
// heads. A lane issues several loads before it uses the first value. plain: rows of x are multiples of a share, at
// multiples of 16 bytes, and have neither mean nor global scales.
template <class Row, class Element, bool plain>
__device__ __forceinline__ void append_rows(const AppendToken &at, const HeadRows<const Element> &x, bool whole,
                                            const AppendSide &side, int heads) {
    constexpr int share = 8 * Row::groups,
                  ahead = plain ? at_least_one(append_ahead_bytes / int(share * sizeof(Element))) : 1;
    constexpr int unrolled = Row::groups == 1 ? ahead : 1;   // code of block formats is long
    const NewRows &rows = side.rows;
    const CacheRows &cache = side.cache;
    const int power = min(32 - __clz(ceil_div(rows.dim, share) - 1), 5), log_at_once = 5 - power;
    const unsigned lane = threadIdx.x % 32, first = lane >> power;
    const long long step = x.head_stride << log_at_once, code_step = cache.code_strides.head << log_at_once,
                    scale_step = cache.scale_strides.head << log_at_once;
    const auto target = [&](char *base, const PageStrides &strides) {
        return base + at.page * strides.page + at.row * strides.token + first * strides.head;
    };
#pragma unroll 1
    for (int begin = 0; begin < rows.dim; begin += share << power) {
        const int column = begin + (lane - (first << power)) * share, columns = rows.dim - column;
        const Element *source = x.first + at.token * x.token_stride + first * x.head_stride + column;
        char *codes = target(cache.codes, cache.code_strides), *scales = target(cache.scales, cache.scale_strides);
        const int end = columns > 0 ? heads : 0;   // of this lane
        int head = first;
#pragma unroll 1
        for (int base = 0; base < heads; base += ahead << log_at_once) {
            // Loads of the rows of several heads.
            tile::Eight<Element> raw[ahead][Row::groups];
#pragma unroll
            for (int i = 0; i < ahead; ++i, source += step) {
#pragma unroll
                for (int j = 0; j < Row::groups; ++j) {
                    if (head + (i << log_at_once) >= end) raw[i][j].clear();
                    else if (plain || whole) raw[i][j].load(source + 8 * j);
                    else raw[i][j].load(source + 8 * j, columns - 8 * j);
                }
            }
            if (!at.is_first()) return;
            // Their codes and scales.
            const int steps = unrolled == ahead ? ahead : (heads - base + (1 << log_at_once) - 1) >> log_at_once;
#pragma unroll unrolled
            for (int i = 0; i < ahead; ++i, head += 1 << log_at_once, codes += code_step, scales += scale_step) {
                if (i >= steps) break;
                const bool present = head < end;
                float values[Row::groups][8];
#pragma unroll
                for (int j = 0; j < Row::groups; ++j) raw[0][j].unpack(values[j]);
                float global_scale = 1.0f;
                if (!plain && present) {
                    if (rows.mean) {
#pragma unroll
                        for (int j = 0; j < share; ++j)
                            if (j < columns) values[j / 8][j % 8] -= rows.mean[head * rows.dim + column + j];
                    }
                    if (rows.global_scale) global_scale = rows.global_scale[head];
                }
                Row::template store<plain>(values, side.rule, global_scale, present, codes, scales, column, rows.dim);
#pragma unroll
                for (int j = 0; j < (ahead - 1) * Row::groups; ++j)
                    raw[j / Row::groups][j % Row::groups] = raw[j / Row::groups + 1][j % Row::groups];
            }
        }
    }
}

template <class Row, class Element>
__device__ __forceinline__ void append_rows(const AppendToken &at, const HeadRows<const Element> &x,
                                            const AppendSide &side, int heads) {
    const auto strides = (x.token_stride | x.head_stride) * sizeof(Element);
    const bool whole = side.rows.dim % (8 * Row::groups) == 0 && strides % 16 == 0 && is_chunk(x.first);
    if (whole && !side.rows.mean && !side.rows.global_scale) append_rows<Row, Element, true>(at, x, true, side, heads);
    else append_rows<Row, Element, false>(at, x, whole, side, heads);
}

template <class Row>
__device__ __forceinline__ void append_rows(const AppendToken &at, const AppendSide &side, int heads) {
    const NewRows &x = side.rows;
    if (!side.cache.codes) return;
    if (x.bf16.first) append_rows<Row>(at, x.bf16, side, heads);
    else if (x.f16.first) append_rows<Row>(at, x.f16, side, heads);
    else append_rows<Row>(at, x.f32, side, heads);
}

// A warp appends the keys and values of one of `tokens` tokens; the cache has `count` slots. claims is null if every
// slot has one token. release: the warp removes its token's claim, which no other warp reads.
template <class Row>
__device__ __forceinline__ void append(const AppendSide &k, const AppendSide &v, const long long *slots, int *claims,
                                       int heads, int page, int tokens, long long count, bool release) {
    const int token = blockIdx.x * append_tokens + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (token >= tokens) return;
    const long long slot = slots[token];
    if (!is_slot(slot, count)) return;
    const unsigned claim = !claims ? token : lane == 0 ? claims[slot] : unclaimed;
    const unsigned in_page = slot / page;
    const AppendToken at = {unsigned(token), claim, in_page, unsigned(slot) - in_page * page};
    append_rows<Row>(at, k, heads);
    append_rows<Row>(at, v, heads);
    if (release && claims && claim == at.token && lane == 0) claims[slot] = unclaimed;
}

}   // namespace op
