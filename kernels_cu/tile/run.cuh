// A run of 1024 consecutive values held by a warp, eight to a lane at a time: how blocks, codes and scales lie in it.
#pragma once

#include <cstdint>

#include "../ptx/warp.cuh"
#include "format.cuh"
#include "narrow.cuh"
#include "scale.cuh"

namespace tile {

constexpr int run_values = 1024;
constexpr int lane_values = 8;                              // consecutive values of a lane: its share of an item
constexpr int run_items = run_values / (32 * lane_values);  // 256 values each

// Where this lane's values of an item begin in the run.
__device__ inline int run_value(int item) { return (32 * item + ptx::laneid()) * lane_values; }

// Eight values from memory, 16-byte aligned, and to memory; a warp moves an item.
__device__ inline void load_values(const float *source, float (&values)[8]) {
    float low[4], high[4];
    unpack(__ldg(reinterpret_cast<const uint4 *>(source)), low, float{});
    unpack(__ldg(reinterpret_cast<const uint4 *>(source) + 1), high, float{});
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = i < 4 ? low[i] : high[i - 4];
}

template <class Element>
__device__ inline void load_values(const Element *source, float (&values)[8]) {
    unpack(__ldg(reinterpret_cast<const uint4 *>(source)), values, Element{});
}

template <class Element>
__device__ inline void store_values(Element *target, const float (&values)[8], bool present) {
    if (present) *reinterpret_cast<uint4 *>(target) = pack(values, Element{});
}

// In f32 neighbouring lanes exchange halves first, so that every store of a pair fills a 32-byte sector.
__device__ inline void store_values(float *target, const float (&values)[8], bool present) {
    const bool odd = ptx::laneid() % 2;
    float first[4], second[4];   // the odd lane stores its neighbour's second chunk and its own
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float received = ptx::shfl_sync_bfly_f32(odd ? values[i] : values[4 + i], 1);
        first[i] = odd ? received : values[i];
        second[i] = odd ? values[4 + i] : received;
    }
    if (!present) return;
    *reinterpret_cast<uint4 *>(odd ? target - 4 : target) = pack(first, float{});
    *reinterpret_cast<uint4 *>(odd ? target + 4 : target + 8) = pack(second, float{});
}

// The codes of one item to memory; the run's codes begin at `run_codes`. Values at `count` and beyond (a multiple of the
// block) are not there. 6-bit codes take two items at a time: see below.
__device__ inline void store_codes(uint32_t *run_codes, const Codes<4> (&codes)[run_items], int count) {
#pragma unroll
    for (int item = 0; item < run_items; ++item)
        if (run_value(item) < count) run_codes[run_value(item) / 8] = codes[item].word[0];
}

__device__ inline void store_codes(uint32_t *run_codes, const Codes<8> (&codes)[run_items], int count) {
#pragma unroll
    for (int item = 0; item < run_items; ++item)
        if (run_value(item) < count)
            *reinterpret_cast<uint2 *>(run_codes + run_value(item) / 4) = {codes[item].word[0], codes[item].word[1]};
}

// A lane's 48 bits are no whole words, a pair's 96 are: the even lane stores the pair's words of one item, the odd lane
// those of the next.
__device__ inline void store_codes(uint32_t *run_codes, const Codes<6> (&codes)[run_items], int count) {
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
        const int first = run_value(item + odd) & ~15;
        if (first >= count) continue;
        uint32_t *target = run_codes + first / 16 * 3;
        target[0] = low[0];
        target[1] = (low[1] & 0xffffu) | high[0] << 16;
        target[2] = high[0] >> 16 | high[1] << 16;
    }
}

// This lane's eight codes of an item.
__device__ inline void load_codes(const uint32_t *run_codes, int item, Codes<4> &codes) {
    codes.word[0] = __ldg(run_codes + run_value(item) / 8);
}

__device__ inline void load_codes(const uint32_t *run_codes, int item, Codes<8> &codes) {
    const uint2 words = __ldg(reinterpret_cast<const uint2 *>(run_codes + run_value(item) / 4));
    codes.word[0] = words.x;
    codes.word[1] = words.y;
}

__device__ inline void load_codes(const uint32_t *run_codes, int item, Codes<6> &codes) {
    const bool odd = ptx::laneid() % 2;   // its codes begin in the middle of the pair's second word
    const uint32_t *source = run_codes + run_value(item) / 16 * 3 + odd;
    const uint32_t low = __ldg(source), high = __ldg(source + 1);
    codes.word[0] = odd ? low >> 16 | high << 16 : low;
    codes.word[1] = odd ? high >> 16 : high & 0xffffu;
}

// Blocks of `block` values in a run.
template <int block>
struct RunBlocks {
    static constexpr int lanes = block / lane_values;      // of a block: 4 or 2
    static constexpr int item_blocks = 32 / lanes;
    static constexpr int count = run_items * item_blocks;  // 32 or 64

    __device__ static int index(int item) { return run_value(item) / block; }

    // The larger amax of all lanes of the block; NaN if any is.
    __device__ static float amax(float of_lane) {
#pragma unroll
        for (int mask = 1; mask < lanes; mask *= 2) of_lane = ptx::max_nan_f32(of_lane, ptx::shfl_sync_bfly_f32(of_lane, mask));
        return of_lane;
    }

    // The sum over the lanes of the block.
    __device__ static float sum(float of_lane) {
#pragma unroll
        for (int mask = 1; mask < lanes; mask *= 2) of_lane += ptx::shfl_sync_bfly_f32(of_lane, mask);
        return of_lane;
    }

    // Stores the run's scale bytes as words; scales[i] is the scale of this lane's block of item i. Blocks at `present` and
    // beyond are not there.
    __device__ static void store_scales(uint8_t *run_scales, const uint32_t (&scales)[run_items], int present) {
        const uint32_t packed = scales[0] | scales[1] << 8 | scales[2] << 16 | scales[3] << 24;
        const int first = 4 * (ptx::laneid() % (count / 4));   // this lane's word: blocks first .. first + 3, of one item
        const int item = first / item_blocks;
        uint32_t word = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const uint32_t received = ptx::shfl_sync_idx_b32(packed, (first + j) % item_blocks * lanes);
            word |= (received >> (8 * item) & 0xffu) << (8 * j);
        }
        if (ptx::laneid() >= count / 4) return;
        if (first + 4 <= present) {
            *reinterpret_cast<uint32_t *>(run_scales + first) = word;
        } else {
#pragma unroll 1   // at most once, in the last run
            for (int j = 0; first + j < present; ++j) run_scales[first + j] = word >> (8 * j);
        }
    }
};

}  // namespace tile
