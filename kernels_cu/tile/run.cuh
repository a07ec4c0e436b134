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

// Eight values from memory, 16-byte aligned.
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

// A lane's eight values of an item, in the form in which they are scaled and encoded with the fewest instructions.
template <class Element>
struct Share {
    float values[8];

    __device__ void load(const Element *source) { load_values(source, values); }

    __device__ void clear() {
#pragma unroll
        for (float &value : values) value = 0.0f;
    }

    __device__ void unpack(float (&floats)[8]) const {
#pragma unroll
        for (int i = 0; i < 8; ++i) floats[i] = values[i];
    }

    // The largest magnitude; NaN if any value is.
    __device__ float amax() const { return amax_of(values); }

    // The codes of all values times `factor`, a power of two.
    template <class Format>
    __device__ Codes<Format::bits> encode(float factor) const {
        float scaled[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) scaled[i] = values[i] * factor;
        return Format::encode(scaled);
    }
};

// In bf16 a product with a power of two is exact, too (what underflows has code 0 either way), two at a time.
template <>
struct Share<__nv_bfloat16> {
    uint32_t pairs[4];

    __device__ void load(const __nv_bfloat16 *source) {
        const uint4 chunk = __ldg(reinterpret_cast<const uint4 *>(source));
        pairs[0] = chunk.x, pairs[1] = chunk.y, pairs[2] = chunk.z, pairs[3] = chunk.w;
    }

    __device__ void clear() {
#pragma unroll
        for (uint32_t &pair : pairs) pair = 0;
    }

    __device__ void unpack(float (&floats)[8]) const { unpack_bf16(pairs, floats); }

    __device__ float amax() const {
        uint32_t largest = pairs[0] & 0x7fff7fffu;
#pragma unroll
        for (int i = 1; i < 4; ++i) largest = ptx::max_nan_bf16x2(largest, pairs[i] & 0x7fff7fffu);
        return ptx::max_nan_f32(ptx::low_bf16(largest), ptx::high_bf16(largest));
    }

    template <class Format>
    __device__ Codes<Format::bits> encode(float factor) const {
        const uint32_t both = __byte_perm(__float_as_uint(factor), 0, 0x3232);   // its bf16 is the upper half
        uint32_t scaled[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) scaled[i] = ptx::mul_bf16x2(pairs[i], both);
        return Format::encode(scaled);
    }
};

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

// On the way back a lane takes one 16-byte chunk of the result at a time, so that the stores of a warp are consecutive:
// eight values of a 16-bit element, four of f32.
template <class Element>
struct Chunks {
    static constexpr int values = elements_per_chunk<Element>;
    static constexpr int items = run_values / (32 * values);

    __device__ static int first(int item) { return (32 * item + ptx::laneid()) * values; }

    // This lane's codes of an item, in the lowest bits; the words above them are not defined.
    __device__ static void load_codes(const uint32_t *run_codes, int item, Codes<4> &codes) {
        if constexpr (values == 8) codes.word[0] = __ldg(run_codes + first(item) / 8);
        else codes.word[0] = __ldg(reinterpret_cast<const uint16_t *>(run_codes) + first(item) / 4);
    }

    __device__ static void load_codes(const uint32_t *run_codes, int item, Codes<8> &codes) {
        codes.word[1] = 0;
        if constexpr (values == 8) {
            const uint2 words = __ldg(reinterpret_cast<const uint2 *>(run_codes + first(item) / 4));
            codes.word[0] = words.x;
            codes.word[1] = words.y;
        } else {
            codes.word[0] = __ldg(run_codes + first(item) / 4);
        }
    }

    __device__ static void load_codes(const uint32_t *run_codes, int item, Codes<6> &codes) {
        // 48 or 24 bits, which begin somewhere in a word. The last lane of four reads no word past its own.
        const int bit = first(item) * 6, shift = bit % 32;
        const uint32_t *source = run_codes + bit / 32;
        const uint32_t low = __ldg(source), high = values == 8 || shift > 8 ? __ldg(source + 1) : 0;
        codes.word[0] = __funnelshift_r(low, high, shift);
        codes.word[1] = high >> shift;
    }

    // Which of the run's blocks the lane's values belong to.
    template <int block>
    __device__ static int block_index(int item) {
        return first(item) / block;
    }

    __device__ static void store(Element *run, int item, const float (&decoded)[8]) {
        float some[values];
#pragma unroll
        for (int i = 0; i < values; ++i) some[i] = decoded[i];
        *reinterpret_cast<uint4 *>(run + first(item)) = pack(some, Element{});
    }
};

// Blocks of `block` values in a run.
template <int block>
struct RunBlocks {
    static constexpr int lanes = block / lane_values;      // of a block: 4 or 2
    static constexpr int item_blocks = 32 / lanes;
    static constexpr int count = run_items * item_blocks;  // 32 or 64

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
