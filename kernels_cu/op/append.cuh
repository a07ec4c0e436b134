// Writes rows of tokens to their slots in the pages of a cache, in its format.
//
// A slot is page * page size + row. If several tokens have one slot, the first is written. Every token claims its slot
// with its number by an atomic minimum, and the thread that finds the number of its token in the claim writes the
// token. A call removes all of its claims, so their memory is initialized only once, with the cache.
#pragma once

#include <cstdint>

#include "../kernel.cuh"
#include "../ptx/barrier.cuh"
#include "../tile/rows.cuh"
#include "ending.cuh"
#include "paged.cuh"

namespace op {

constexpr int append_threads = 128, claim_threads = 128;
constexpr int append_tokens = 4;        // of a block: enough bytes in flight for each thread to saturate memory
constexpr int unclaimed = 0x7f7fffff;   // above every token; the bits of the largest float

__device__ inline bool is_slot(long long slot, long long slots) { return slot >= 0 && slot < slots; }

// claims[slots[token]] becomes the least token.
__device__ inline void claim_slots(const long long *slots, int *claims, int tokens, long long count) {
    const int token = blockIdx.x * claim_threads + threadIdx.x;
    if (token < tokens && is_slot(slots[token], count)) atomicMin(claims + slots[token], token);
}

// What is appended: x [tokens, heads, dim] in one of three types, strides in elements.
struct NewRows {
    const __nv_bfloat16 *bf16;
    const __half *f16;
    const float *f32;
    long long token_stride, head_stride;
    int heads, dim;
    const float *mean;           // [heads, dim]: subtracted from each row, or null
    const float *global_scale;   // [heads]: divisors of rows, or null
};

// The cache: codes[pages, heads, page, bytes] and scales[pages, heads, page, blocks], as bytes.
struct CacheRows {
    char *codes, *scales;
    PageStrides code_strides, scale_strides;
    int page;
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
    __device__ static void store(float (&values)[1][8], int rule, float global_scale, bool present, char *codes, char *,
                                 int column, int columns) {
        divide(values, global_scale);
        if (present) store_share(reinterpret_cast<Element *>(codes) + column, columns - column, values);
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

// Where the rows of a block's tokens begin in the cache, in bytes from head 0 of row 0 of page 0; -1 if a token is not
// written.
struct AppendShared {
    long long codes[append_tokens], scales[append_tokens];
};

// One thread looks up each token. release: it removes the token's claim, which no other thread reads.
__device__ inline void find_tokens(AppendShared &shared, const long long *slots, int *claims, const CacheRows &cache,
                                   int tokens, long long count, bool release) {
    const int token = blockIdx.x * append_tokens + threadIdx.x;
    if (threadIdx.x < append_tokens) {
        const long long slot = token < tokens ? slots[token] : -1;
        shared.codes[threadIdx.x] = -1, shared.scales[threadIdx.x] = 0;
        if (is_slot(slot, count) && claims[slot] == token) {
            if (release) claims[slot] = unclaimed;
            const long long page = slot / cache.page, row = slot - page * cache.page;
            shared.codes[threadIdx.x] = page * cache.code_strides.page + row * cache.code_strides.token;
            shared.scales[threadIdx.x] = page * cache.scale_strides.page + row * cache.scale_strides.token;
        }
    }
    ptx::bar_sync();   // all threads see the tokens
}

// Appends rows of one type. A thread has the same share of the rows of every token of the block, and issues several
// loads before it uses the first value. If a token needs half the threads or fewer, the block writes several tokens at
// once.
template <class Row, class Element>
__device__ inline void append_rows(const AppendShared &shared, const Element *x, const NewRows &rows,
                                   const CacheRows &cache, int rule) {
    constexpr int share = 8 * Row::groups,
                  ahead = share * sizeof(Element) <= 32 ? 4 : 2;   // tokens whose loads are issued at once
    const int shares = ceil_div(rows.dim, share), items = rows.heads * shares, at_once = max(append_threads / items, 1);
    const bool whole = rows.dim % share == 0 && (reinterpret_cast<uintptr_t>(x) | rows.token_stride * sizeof(Element) |
                                                 rows.head_stride * sizeof(Element)) %
                                                        16 ==
                                                    0;
#pragma unroll 1
    for (int begin = 0; begin < items; begin += append_threads) {
        // This thread's item: a share of the rows of one head.
        const int at = begin + threadIdx.x, first = at_once > 1 ? at / items : 0,
                  item = min(at - first * items, items - 1);
        const bool has_item = at < (first + 1) * items && first < at_once;
        const int head = item / shares, column = item % shares * share, columns = rows.dim - column;
        const Element *source = x + static_cast<long long>(blockIdx.x) * append_tokens * rows.token_stride +
                                head * rows.head_stride + column;
        const float global_scale = rows.global_scale ? rows.global_scale[head] : 1.0f;
#pragma unroll 1
        for (int base = first; base - first < append_tokens; base += ahead * at_once) {
            // Loads of `ahead` tokens.
            tile::Eight<Element> raw[ahead][Row::groups];
            bool present[ahead];
#pragma unroll
            for (int step = 0; step < ahead; ++step) {
                const int token = base + step * at_once;
                present[step] = has_item && token < append_tokens && shared.codes[token] >= 0;
                const Element *row = source + token * rows.token_stride;
#pragma unroll
                for (int i = 0; i < Row::groups; ++i) {
                    if (present[step] && whole) raw[step][i].load(row + 8 * i);
                    else raw[step][i].load(row + 8 * i, present[step] ? columns - 8 * i : 0);
                }
            }
            // Their codes and scales.
#pragma unroll
            for (int step = 0; step < ahead; ++step) {
                if (base - first + step * at_once >= append_tokens) break;
                float values[Row::groups][8];
#pragma unroll
                for (int i = 0; i < Row::groups; ++i) raw[step][i].unpack(values[i]);
                if (rows.mean) {
#pragma unroll
                    for (int i = 0; i < share; ++i)
                        if (i < columns) values[i / 8][i % 8] -= rows.mean[head * rows.dim + column + i];
                }
                const int token = min(base + step * at_once, append_tokens - 1);
                Row::store(values, rule, global_scale, present[step],
                           cache.codes + shared.codes[token] + head * cache.code_strides.head,
                           cache.scales + shared.scales[token] + head * cache.scale_strides.head, column, rows.dim);
            }
        }
    }
}

// A block appends append_tokens of `tokens` tokens; the cache has `count` slots.
template <class Row>
__device__ inline void append(AppendShared &shared, const NewRows &x, const long long *slots, int *claims,
                              const CacheRows &cache, int tokens, long long count, int rule, bool release) {
    find_tokens(shared, slots, claims, cache, tokens, count, release);
    if (x.bf16) append_rows<Row>(shared, x.bf16, x, cache, rule);
    else if (x.f16) append_rows<Row>(shared, x.f16, x, cache, rule);
    else append_rows<Row>(shared, x.f32, x, cache, rule);
}

}   // namespace op
