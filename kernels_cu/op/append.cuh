// Rows of tokens to their slots in the pages of a cache, in its format.
//
// A slot is page * page size + row. Of several tokens with one slot the first is written: every token claims its slot with its
// number, the least number stays, and whoever finds its own there writes the token. All claims are those of one call, and none
// is left behind, so that memory for them is set once, when the cache is made.
#pragma once

#include <cstdint>

#include "../kernel.cuh"
#include "../ptx/barrier.cuh"
#include "ending.cuh"
#include "paged.cuh"

namespace op {

constexpr int append_threads = 128, claim_threads = 128;
constexpr int unclaimed = 0x7f7fffff;   // of a slot, above every token; as a float the largest

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
    const float *mean;            // [heads, dim]: what is taken from each row, or null
    const float *global_scale;    // [heads]: what rows are divided by, or null
};

// Where it goes.
struct CacheRows {
    char *codes, *scales;
    PageStrides code_strides, scale_strides;
    int page;
};

// How a lane's share of a row is stored, by format: `groups` times eight values, from `column` on.
template <class Element>
struct PlainRow {
    static constexpr int groups = 1;
    __device__ static void store(float (&values)[1][8], int rule, float global_scale, bool present, char *codes, char *, int column, int columns) {
#pragma unroll
        for (float &value : values[0]) value = value / global_scale;
        if (present) store_share(reinterpret_cast<Element *>(codes) + column, columns - column, values);
    }
};

template <int bits, int block, int groups>
__device__ inline void store_quantized(const tile::LaneCodes<bits, groups> &share, uint32_t scale, char *codes, char *scales, int column) {
    uint32_t *target = reinterpret_cast<uint32_t *>(codes + column * bits / 8);
    if constexpr (bits == 4) tile::store(target, uint2{share.word[0], share.word[1]});
    else tile::store(target, uint4{share.word[0], share.word[1], share.word[2], share.word[3]});
    if (column % block == 0) scales[column / block] = scale;
}

template <class Format>
struct MxRow {
    static constexpr int groups = 2;
    __device__ static void store(float (&values)[2][8], int rule, float global_scale, bool present, char *codes, char *scales, int column, int) {
#pragma unroll
        for (auto &group : values)
#pragma unroll
            for (float &value : group) value = value / global_scale;
        tile::LaneCodes<Format::bits, 2> share;
        const uint32_t scale = encode_share<Format>(values, tile::ScaleRule(rule), share);
        if (present) store_quantized<Format::bits, tile::mx_block>(share, scale, codes, scales, column);
    }
};

struct Nvfp4Row {
    static constexpr int groups = 2;
    __device__ static void store(float (&values)[2][8], int rule, float global_scale, bool present, char *codes, char *scales, int column, int) {
        const tile::Nvfp4Global global(global_scale);
        tile::LaneCodes<4, 2> share;
        uint32_t scale;
        tile::with_nvfp4_rule(rule, [&](auto better_of_two) { scale = encode_nvfp4_share<better_of_two>(values, global, share); });
        if (present) store_quantized<4, tile::nvfp4_block>(share, scale, codes, scales, column);
    }
};

// A block has a token. release: whether its claim is given up.
template <class Row>
__device__ inline void append(const NewRows &x, const long long *slots, int *claims, const CacheRows &cache, long long count, int rule, bool release) {
    const int token = blockIdx.x;
    const long long slot = slots[token];
    if (!is_slot(slot, count)) return;
    const bool first = claims[slot] == token;
    ptx::bar_sync();   // all threads have read the claim
    if (!first) return;
    if (release && threadIdx.x == 0) claims[slot] = unclaimed;

    constexpr int share = 8 * Row::groups;
    const long long page = slot / cache.page, row = slot - page * cache.page;
    const int shares = ceil_div(x.dim, share), items = x.heads * shares;
#pragma unroll 1
    for (int begin = 0; begin < items; begin += append_threads) {
        const int item = min(begin + int(threadIdx.x), items - 1), head = item / shares, column = item % shares * share;
        const long long at = token * x.token_stride + head * x.head_stride;
        float values[Row::groups][8];
        load_share(FloatRows{x.bf16 ? x.bf16 + at : nullptr, x.f16 ? x.f16 + at : nullptr, x.f32 ? x.f32 + at : nullptr, 0}, 0, column, x.dim, values);
        if (x.mean) {
#pragma unroll
            for (int i = 0; i < share; ++i)
                if (column + i < x.dim) values[i / 8][i % 8] -= x.mean[head * x.dim + column + i];
        }
        const auto place = [&](char *base, const PageStrides &strides) {
            return base + page * strides.page + head * strides.head + row * strides.token;
        };
        Row::store(values, rule, x.global_scale ? x.global_scale[head] : 1.0f, begin + int(threadIdx.x) < items,
                   place(cache.codes, cache.code_strides), place(cache.scales, cache.scale_strides), column, x.dim);
    }
}

}  // namespace op
