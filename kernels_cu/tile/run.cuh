// A run of consecutive values held by a warp: the places of a lane's values, blocks, codes and scales in it.
#pragma once

#include <cstdint>

#include "../ptx/warp.cuh"
#include "format.cuh"
#include "narrow.cuh"
#include "scale.cuh"
#include "thresholds.cuh"

namespace tile {

// A run is four items. A lane has some consecutive values of each item: mostly 32 bytes, a sector of memory.
constexpr int run_items = 4;
template <class Element>
constexpr int sector_values = 32 / sizeof(Element);
template <int lane_values, int items = run_items>
constexpr int run_values = items * 32 * lane_values;

// Where this lane's values of an item begin in the run.
template <int lane_values>
__device__ inline int run_value(int item) {
    return (32 * item + ptx::laneid()) * lane_values;
}

// Sixteen consecutive values of a lane with 16, or of a pair of lanes with eight each. True in the lane of a pair that
// has the upper ones.
template <int groups>
__device__ inline bool gather_sixteen(const float (&values)[groups][8], float (&sixteen)[2][8]) {
    const bool upper = groups == 1 && ptx::laneid() % 2;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float other = groups == 1 ? ptx::shfl_sync_bfly_f32(values[0][i], 1) : values[groups - 1][i];
        sixteen[0][i] = upper ? other : values[0][i];
        sixteen[1][i] = upper ? values[0][i] : other;
    }
    return upper;
}

// Stores the two chunks of each lane of an even and odd pair, four consecutive chunks in memory; this lane's begin at
// `target`. The lanes exchange chunks, so that every instruction writes whole sectors: the first that of the even lane,
// the second that of the odd lane. Called by the whole warp.
template <class Element>
__device__ inline void store_paired(Element *target, const uint4 &low, const uint4 &high, bool stored) {
    constexpr int chunk = elements_per_chunk<Element>;
    const bool odd = ptx::laneid() % 2;
    const auto exchanged = [odd](uint32_t low, uint32_t high) { return ptx::shfl_sync_bfly_b32(odd ? low : high, 1); };
    const uint4 other = {exchanged(low.x, high.x), exchanged(low.y, high.y), exchanged(low.z, high.z),
                         exchanged(low.w, high.w)};
    if (!stored) return;
    target -= odd ? chunk : 0;
    store(target, odd ? other : low);
    store(target + 2 * chunk, odd ? high : other);
}

// The codes of a lane's values of an item, joined from groups of eight. The last word of eight 6-bit codes is half
// full.
template <int bits, int groups>
struct LaneCodes {
    static constexpr int words = (8 * groups * bits + 31) / 32;
    uint32_t word[words];

    __device__ explicit LaneCodes(const Codes<bits> (&of_group)[groups]) {
        if constexpr (bits == 6 && groups == 2) {
            word[0] = of_group[0].word[0];
            word[1] = __byte_perm(of_group[0].word[1], of_group[1].word[0], 0x5410);
            word[2] = __byte_perm(of_group[1].word[0], of_group[1].word[1], 0x5432);
        } else {
#pragma unroll
            for (int i = 0; i < words; ++i) word[i] = of_group[i / (words / groups)].word[i % (words / groups)];
        }
    }
    __device__ LaneCodes() {}

    __device__ void clear() {
#pragma unroll
        for (uint32_t &one : word) one = 0;
    }
};

// A lane's values of an item.
template <class Element, int lane_values>
struct Share {
    static constexpr int groups = lane_values / 8;   // of eight values
    static constexpr int group_chunks = 8 / elements_per_chunk<Element>;
    uint4 chunks[groups * group_chunks];

    // 16-byte aligned.
    __device__ void load(const Element *source) {
#pragma unroll
        for (int i = 0; i < groups * group_chunks; ++i) chunks[i] = __ldg(reinterpret_cast<const uint4 *>(source) + i);
    }

    __device__ void clear() {
#pragma unroll
        for (uint4 &chunk : chunks) chunk = {0, 0, 0, 0};
    }

    __device__ void unpack(float (&values)[groups][8]) const {
        constexpr int some = elements_per_chunk<Element>;
#pragma unroll
        for (int i = 0; i < groups * group_chunks; ++i) {
            float of_chunk[some];
            tile::unpack(chunks[i], of_chunk, Element{});
#pragma unroll
            for (int j = 0; j < some; ++j) values[i / group_chunks][i % group_chunks * some + j] = of_chunk[j];
        }
    }

    // The largest magnitude; NaN if any value is.
    __device__ float amax() const { return amax_of(chunks, Element{}); }

    // The codes of all values times 2^(127 - scale).
    template <class Format>
    __device__ LaneCodes<Format::bits, groups> encode(uint32_t scale) const {
        Codes<Format::bits> codes[groups];
        if constexpr (is_bf16<Element>) {
#pragma unroll
            for (int i = 0; i < groups; ++i)
                codes[i] = encode_scaled<Format>({chunks[i].x, chunks[i].y, chunks[i].z, chunks[i].w}, scale);
        } else {
            float values[groups][8];
            unpack(values);
#pragma unroll
            for (int i = 0; i < groups; ++i) codes[i] = encode_scaled<Format>(values[i], scale);
        }
        return LaneCodes<Format::bits, groups>(codes);
    }

    // The e2m1 codes by thresholds.
    __device__ void encode(const E2m1Thresholds<Element> &thresholds, Codes<4> (&codes)[groups]) const {
#pragma unroll
        for (int i = 0; i < groups; ++i)
            codes[i] = join_upper_nibbles({thresholds.codes(chunks[i].x), thresholds.codes(chunks[i].y),
                                           thresholds.codes(chunks[i].z), thresholds.codes(chunks[i].w)});
    }
};

// Stores the codes of an item; `run_codes` is the address of the run's first code. Values from `count` (a multiple of
// the block) on do not exist.
template <int bits, int groups>
__device__ inline void store_codes(uint32_t *run_codes, int item, const LaneCodes<bits, groups> &codes, int count) {
    if (run_value<8 * groups>(item) >= count) return;
    constexpr int words = LaneCodes<bits, groups>::words;
    uint32_t *target = run_codes + (32 * item + ptx::laneid()) * words;
    const uint32_t (&word)[words] = codes.word;
    if constexpr (words == 1) target[0] = word[0];
    else if constexpr (words == 2) store(target, uint2{word[0], word[1]});
    else if constexpr (words == 4) store(target, uint4{word[0], word[1], word[2], word[3]});
    else target[0] = word[0], target[1] = word[1], target[2] = word[2];
}

// Those of all items.
template <int bits, int groups>
__device__ inline void store_codes(uint32_t *run_codes, const LaneCodes<bits, groups> (&codes)[run_items], int count) {
#pragma unroll
    for (int item = 0; item < run_items; ++item) store_codes(run_codes, item, codes[item], count);
}

// Eight 6-bit codes are 48 bits, but the codes of a pair of lanes are three words: the even lane stores the pair's
// words of one item, the odd lane those of the next.
__device__ inline void store_codes(uint32_t *run_codes, const LaneCodes<6, 1> (&codes)[run_items], int count) {
    const bool odd = ptx::laneid() % 2;
#pragma unroll
    for (int item = 0; item < run_items; item += 2) {
        uint32_t low[2], high[2];   // the pair's two halves of this lane's item
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t one = codes[item].word[i], next = codes[item + 1].word[i];
            const uint32_t received = ptx::shfl_sync_bfly_b32(odd ? one : next, 1);
            low[i] = odd ? received : one;
            high[i] = odd ? next : received;
        }
        const int first = run_value<8>(item + odd) & ~15;
        if (first >= count) continue;
        uint32_t *target = run_codes + first / 16 * 3;
        target[0] = low[0];
        target[1] = __byte_perm(low[1], high[0], 0x5410);
        target[2] = __byte_perm(high[0], high[1], 0x5432);
    }
}

// Blocks of `block` values in a run.
template <int block, int lane_values>
struct RunBlocks {
    static constexpr int lanes = block / lane_values;   // of a block: 4, 2 or 1
    static constexpr int item_blocks = 32 / lanes;

    // The larger amax of all lanes of the block; NaN if any is.
    __device__ static float amax(float of_lane) {
#pragma unroll
        for (int mask = 1; mask < lanes; mask *= 2)
            of_lane = ptx::max_nan_f32(of_lane, ptx::shfl_sync_bfly_f32(of_lane, mask));
        return of_lane;
    }

    // Stores the run's scales by target.store(index of the block in the run, scale); scales[i] is the scale of this
    // lane's block of item i. All lanes of a block have it, so each stores the scale of another item, and a warp stores
    // 32 scales at a time. Blocks from `present` on do not exist.
    template <class Target>
    __device__ static void store_scales(const Target &target, const uint32_t (&scales)[run_items], int present) {
        const uint32_t lane = ptx::laneid(), part = lane % lanes, in_item = lane / lanes;
#pragma unroll
        for (int first = 0; first < run_items; first += lanes) {
            uint32_t scale = scales[first];
#pragma unroll
            for (int i = 1; i < lanes; ++i)
                if (part == i) scale = scales[first + i];
            const int index = (first + part) * item_blocks + in_item;
            if (index < present) target.store(index, scale);
        }
    }
};

// Dequantization: a lane computes one 16-byte chunk of the result at a time, eight values of a 16-bit element or four
// of f32, so that the stores of a warp are coalesced. Loading and decoding are separate, so that all loads of a run are
// issued before the first is waited for.
template <class Element, int bits>
struct Chunks {
    static constexpr int values = elements_per_chunk<Element>;
    static constexpr int items = run_values<sector_values<Element>> / (32 * values);

    __device__ static int first(int item) { return (32 * item + ptx::laneid()) * values; }

    uint32_t low = 0, high = 0;   // the words that hold this lane's codes
    uint32_t scale = 0;           // of its block

    // The codes from value `at` of the run on.
    __device__ void load(const uint32_t *run_codes, int at) {
        if constexpr (values * bits == 16) {
            low = __ldg(reinterpret_cast<const uint16_t *>(run_codes) + at / 4);
        } else if constexpr (values * bits == 32) {
            low = __ldg(run_codes + at / values);
        } else if constexpr (values * bits == 64) {
            const uint2 words = __ldg(reinterpret_cast<const uint2 *>(run_codes) + at / values);
            low = words.x, high = words.y;
        } else {   // 48 or 24 bits, which begin somewhere in a word; one word may hold all 24
            const uint32_t *source = run_codes + at * 6 / 32;
            low = __ldg(source);
            high = __ldg(source + (values == 8 || at * 6 % 32 > 8));
        }
    }

    // The codes in the lowest bits; the bits above are undefined.
    __device__ Codes<bits> codes(int at) const {
        Codes<bits> result;
        if constexpr (bits == 6) {
            result.word[0] = __funnelshift_r(low, high, at * 6);
            result.word[1] = high >> (at * 6 % 32);
        } else {
            result.word[0] = low;
            if constexpr (bits == 8) result.word[1] = high;
        }
        return result;
    }

    __device__ static void store(Element *target, const float (&decoded)[8]) {
        float some[values];
#pragma unroll
        for (int i = 0; i < values; ++i) some[i] = decoded[i];
        tile::store(target, pack(some, Element{}));
    }
};

}   // namespace tile
