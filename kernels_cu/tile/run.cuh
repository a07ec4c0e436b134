// A run of 1024 consecutive values held by a warp, 16 bytes per lane at a time: how MX blocks, codes and scales lie in it.
#pragma once

#include <cstdint>

#include "../ptx/warp.cuh"
#include "format.cuh"
#include "scale.cuh"

namespace tile {

constexpr int run_values = 1024;
constexpr int run_blocks = run_values / mx_block;

// Item i is the i-th group of 32 chunks; lane l holds chunk l of each item. A block of 32 values lies in neighbouring lanes.
template <class Element>
struct Run {
    static constexpr int lane_values = elements_per_chunk<Element>;   // 4 or 8
    static constexpr int items = run_values / (32 * lane_values);     // 8 or 4
    static constexpr int block_lanes = mx_block / lane_values;        // 8 or 4
    static constexpr int words = run_values / 32 / 8;                 // of eight codes each, to a lane
    static constexpr uint32_t item_codes = 0xffffffffu >> (32 - 4 * lane_values);   // an item's bits in such a word

    // Where this lane's values of an item begin in the run.
    __device__ static int value(int item) { return (32 * item + ptx::laneid()) * lane_values; }
    __device__ static int block(int item) { return value(item) / mx_block; }

    // The largest magnitude of the block that this lane's values belong to; NaN if any is.
    __device__ static float block_amax(const float (&values)[lane_values]) {
        float amax = amax_of(values);
#pragma unroll
        for (int mask = 1; mask < block_lanes; mask *= 2) amax = ptx::max_nan_f32(amax, ptx::shfl_sync_bfly_f32(amax, mask));
        return amax;
    }

    // Stores the codes of all items, 4 bits each. codes[w] holds eight codes of this lane: those of item w, or of items 2 w
    // and 2 w + 1 where an item has four. Values at `count` and beyond (a multiple of 32) are not stored.
    __device__ static void store_codes(uint32_t *run_codes, const uint32_t (&codes)[words], int count) {
#pragma unroll
        for (int w = 0; w < words; ++w) {
            uint32_t word = codes[w];
            int first = value(w);
            if constexpr (lane_values == 4) {
                // A lane has half a word of each item. Neighbours exchange halves: the even lane stores the word of the
                // one item, the odd lane that of the other.
                const bool odd = ptx::laneid() % 2;
                const uint32_t received = ptx::shfl_sync_bfly_b32(word, 1);
                word = odd ? received >> 16 | (word & 0xffff0000u) : (word & 0xffffu) | received << 16;
                first = value(2 * w + odd) & ~7;
            }
            if (first < count) run_codes[first / 8] = word;
        }
    }

    // Stores the 32 scale bytes of the run as eight words; scales[i] is the scale of the block of this lane's values of
    // item i. Blocks at `count` and beyond are not stored.
    __device__ static void store_scales(uint8_t *run_scales, const uint32_t (&scales)[items], int count) {
        constexpr int item_blocks = run_blocks / items;
        uint32_t packed[items / 4];   // one byte per item
#pragma unroll
        for (int i = 0; i < items / 4; ++i)
            packed[i] = scales[4 * i] | scales[4 * i + 1] << 8 | scales[4 * i + 2] << 16 | scales[4 * i + 3] << 24;
        const int first = 4 * (ptx::laneid() % 8);   // this lane's word: blocks first .. first + 3, all of one item
        const int item = first / item_blocks;
        uint32_t word = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int source = (first + j) % item_blocks * block_lanes;
#pragma unroll
            for (int i = 0; i < items / 4; ++i) {
                const uint32_t received = ptx::shfl_sync_idx_b32(packed[i], source);
                if (item / 4 == i) word |= (received >> (8 * (item % 4)) & 0xffu) << (8 * j);
            }
        }
        if (ptx::laneid() >= 8) return;
        if (first + 4 <= count) {
            *reinterpret_cast<uint32_t *>(run_scales + first) = word;
        } else {
#pragma unroll 1   // at most once, in the last run
            for (int j = 0; first + j < count; ++j) run_scales[first + j] = word >> (8 * j);
        }
    }
};

}  // namespace tile
