// Quantization to the MX formats and NVFP4 and back, of blocks along the last axis.
#pragma once

#include <cstdint>

#include "../kernel.cuh"
#include "../tile/format.cuh"
#include "../tile/lanes.cuh"
#include "../tile/narrow.cuh"
#include "../tile/run.cuh"
#include "../tile/scale.cuh"
#include "../tile/thresholds.cuh"
#include "layout.cuh"

namespace op {

constexpr int quantize_threads = 256;
// Blocks of threads on a multiprocessor: enough warps to hide memory latency.
template <class Format, class Element>
constexpr int quantize_blocks = Format::bits == 4 && tile::is_bf16<Element> ? 3 : 4;
template <class Element>
constexpr int quantize_nvfp4_blocks = sizeof(Element) == 4 ? 3 : 4;
// Values of a block of threads: in NVFP4 a lane takes whole blocks, otherwise sectors of memory.
template <class Element>
constexpr int quantize_tile = quantize_threads / 32 * tile::run_values<tile::sector_values<Element>>;
template <class Element>
constexpr int nvfp4_items = tile::uses_thresholds<Element> ? 4 : 16 / sizeof(Element);   // of a run
template <class Element>
constexpr int quantize_nvfp4_tile = quantize_threads / 32 * tile::run_values<tile::nvfp4_block, nvfp4_items<Element>>;

// The first value of this warp's run.
template <int run_values>
__device__ inline size_t first_of_run(uint32_t block = blockIdx.x) {
    return (size_t(block) * (quantize_threads / 32) + threadIdx.x / 32) * run_values;
}

// Fills tiles of scales; called by the lanes of a warp whose run begins at `first`, after all values.
template <int run_values, class Scales>
__device__ inline void fill_tiles(const Scales &scales, size_t first, size_t count) {
    const size_t run = first / run_values, runs = (count + run_values - 1) / run_values;
    const size_t idle = size_t(gridDim.x) * (quantize_threads / 32) - runs;
    scales.fill(tile::lane_item((run - runs) * 32), idle * 32);
}

// Loads this lane's values of an item; those past `here` are zeros.
template <class Element, int lane_values>
__device__ inline void load_item(const Element *run, int item, int here, tile::Share<Element, lane_values> &share) {
    const Element *lane = run + uint32_t(tile::run_value<lane_values>(0));   // one address for all items
    if (tile::run_value<lane_values>(item) < here) share.load(lane + item * (32 * lane_values));
    else share.clear();
}

// Codes and scales of x[count] in an MX format; count is a multiple of 32.
template <class Format, class Element, class Scales>
__device__ inline void quantize_mx(const Element *x, uint32_t *codes, const Scales &scales, size_t count,
                                   tile::ScaleRule rule) {
    constexpr int lane_values = tile::sector_values<Element>;
    using Share = tile::Share<Element, lane_values>;
    using Blocks = tile::RunBlocks<tile::mx_block, lane_values>;
    constexpr int run_values = tile::run_values<lane_values>;
    const size_t first = first_of_run<run_values>();
    if (first >= count) return fill_tiles<run_values>(scales, first, count);
    const int here = min(count - first, size_t(run_values));

    // All loads, then codes and scales, then all stores.
    Share shares[tile::run_items];
#pragma unroll
    for (int item = 0; item < tile::run_items; ++item) load_item(x + first, item, here, shares[item]);
    tile::LaneCodes<Format::bits, Share::groups> run_codes[tile::run_items];
    uint32_t run_scales[tile::run_items];
#pragma unroll
    for (int item = 0; item < tile::run_items; ++item) {
        const uint32_t scale = tile::mx_scale<Format>(Blocks::amax(shares[item].amax()), rule);
        run_scales[item] = scale;
        run_codes[item] = shares[item].template encode<Format>(scale);
        if (scale == tile::ue8m0_nan) run_codes[item].clear();
    }
    tile::store_codes(codes + first * Format::bits / 32, run_codes, here);
    Blocks::store_scales(scales.from(first / tile::mx_block), run_scales, here / tile::mx_block);
}

// x[count] of `bits`-bit codes and of scales for `block` values each: decode(codes, scale, values) gives a lane's
// values.
template <int bits, int block, class Element, class Decode>
__device__ inline void dequantize(const uint32_t *codes, const uint8_t *scales, Element *x, size_t count,
                                  Decode &&decode) {
    using Chunks = tile::Chunks<Element, bits>;
    constexpr int lane_values = tile::sector_values<Element>;
    constexpr int run_values = tile::run_values<lane_values>;
    const size_t first = first_of_run<run_values>();
    if (first >= count) return;
    const int here = min(count - first, size_t(run_values));

    // All loads, then values and their stores.
    Chunks chunks[Chunks::items];
#pragma unroll
    for (int item = 0; item < Chunks::items; ++item) {
        const int at = min(Chunks::first(item), here - Chunks::values);   // no branch: past the end, the last again
        chunks[item].load(codes + first * bits / 32, at);
        chunks[item].scale = __ldg(scales + first / block + at / block);
    }
#pragma unroll
    for (int item = 0; item < Chunks::items; ++item) {
        const int at = Chunks::first(item);
        float values[8];
        decode(chunks[item].codes(at), chunks[item].scale, values);
        if (at < here) Chunks::store(x + first + at, values);
    }
}

// x[count] of codes and scales in an MX format: exact in f32 (subnormals too), rounded once to f16 or bf16.
template <class Format, class Element>
__device__ inline void dequantize_mx(const uint32_t *codes, const uint8_t *scales, Element *x, size_t count) {
    using Codes = tile::Codes<Format::bits>;
    dequantize<Format::bits, tile::mx_block>(codes, scales, x, count,
                                             [](const Codes &some, uint32_t scale, float (&values)[8]) {
                                                 Format::decode(some, values);
                                                 const float factor = ptx::cvt_f32_ue8m0(scale);
#pragma unroll
                                                 for (float &value : values) value *= factor;
                                             });
}

// The NVFP4 blocks of a lane: those with the numbers lane, lane + 32 and so on of the warp's run. The first blocks
// of threads take the last runs, which the L2 still holds where amax() has just read the array.
template <class Element, class Scales>
struct Nvfp4Lane {
    using Share = tile::Share<Element, tile::nvfp4_block>;
    static constexpr int run_values = tile::run_values<tile::nvfp4_block, nvfp4_items<Element>>;
    const Element *x;
    uint32_t *codes;
    Scales scales;
    int items;   // of the run, that there are

    __device__ Nvfp4Lane(const Element *x, uint32_t *codes, const Scales &scales, size_t run, size_t count)
        : scales(scales.from(tile::lane_item(run / tile::nvfp4_block))) {
        const size_t first = run + tile::run_value<tile::nvfp4_block>(0);
        this->x = x + first;
        this->codes = codes + first / 8;
        items = first < count ? ceil_div<int>(min(count - first, size_t(run_values)), 32 * tile::nvfp4_block) : 0;
    }

    // No branch: past the end, the last again.
    __device__ void load(int item, Share &share) const {
        share.load(x + min(item, items - 1) * (32 * tile::nvfp4_block));
    }

    __device__ void store_codes(int item, const tile::Codes<4> (&block_codes)[2]) const {
        if (item >= items) return;
        tile::store(codes + item * (32 * tile::nvfp4_block / 8), uint2{block_codes[0].word[0], block_codes[1].word[0]});
    }

    __device__ void store_scale(int item, uint32_t scale) const {
        if (item < items) scales.store(item * 32, scale);
    }
};

// Codes [count / 2] and ue4m3 scales of x[count] in NVFP4 under a given global scale; count is a multiple of 16. With
// `better_of_two` a block's largest value goes to 4 instead of 6 where that makes the squared error smaller.
template <bool better_of_two, class Element, class Scales>
__device__ inline void quantize_nvfp4(const Element *x, float global_scale, uint32_t *codes, const Scales &scales,
                                      size_t count) {
    using Lane = Nvfp4Lane<Element, Scales>;
    using Share = typename Lane::Share;
    constexpr int items = nvfp4_items<Element>;
    const size_t run = first_of_run<Lane::run_values>(gridDim.x - 1 - blockIdx.x);
    if (run >= count) return fill_tiles<Lane::run_values>(scales, run, count);
    const Lane lane(x, codes, scales, run, count);
    if (lane.items == 0) return;
    const tile::Nvfp4Global global(global_scale);
    Share share;
    tile::Codes<4> block_codes[2];
    const auto divide = [&](int item) {   // any block
        float values[2][8];
        share.unpack(values);
        const uint32_t scale = tile::encode_nvfp4_block<better_of_two>(values, share.amax(), global, block_codes).code;
        lane.store_codes(item, block_codes);
        lane.store_scale(item, scale);
    };
    if constexpr (tile::uses_thresholds<Element> && !better_of_two) {
        // Pairs of 16-bit values by thresholds; then, one by one, the blocks that have none.
        Share shares[items];
#pragma unroll
        for (int item = 0; item < items; ++item) lane.load(item, shares[item]);
        uint32_t others = 0;                  // items without thresholds
        [[maybe_unused]] uint32_t kept = 0;   // their scales, one byte for each
#pragma unroll
        for (int item = 0; item < items; ++item) {
            const float amax = shares[item].amax();
            if (!tile::has_thresholds<Element>(amax, global)) others |= 1u << item;
            const tile::Nvfp4Scale scale = tile::plain_nvfp4_scale(amax, global);
            shares[item].encode(tile::E2m1Thresholds<Element>({scale.step, amax}), block_codes);
            lane.store_codes(item, block_codes);
            if constexpr (Scales::takes_registers) kept |= scale.code << (8 * item);
            else lane.store_scale(item, scale.code);
        }
        if constexpr (Scales::takes_registers) {
#pragma unroll 1
            for (int item = 0; item < items; ++item) lane.store_scale(item, kept >> (8 * item));
        }
        for (; others; others &= others - 1) {
            const int item = __ffs(others) - 1;
            lane.load(item, share);
            divide(item);
        }
    } else {
        // Every block by division, with the next one in flight.
        Share next;
        lane.load(0, next);
#pragma unroll 1   // unrolling would overflow the instruction cache
        for (int item = 0; item < items; ++item) {
            share = next;
            if (item + 1 < items) lane.load(item + 1, next);   // in flight while this one is encoded
            divide(item);
        }
    }
}

// x[count] of NVFP4 codes and scales: e2m1 times f32(global scale x scale), both products in f32, rounded once more to
// f16 or bf16.
template <class Element>
__device__ inline void dequantize_nvfp4(const uint32_t *codes, const uint8_t *scales, float global_scale, Element *x,
                                        size_t count) {
    using Codes = tile::Codes<4>;
    dequantize<4, tile::nvfp4_block>(codes, scales, x, count,
                                     [=](const Codes &some, uint32_t scale, float (&values)[8]) {
                                         tile::E2m1::decode(some, values);
                                         const float step = tile::nvfp4_step(scale, global_scale);
#pragma unroll
                                         for (float &value : values) value *= step;
                                     });
}

}   // namespace op
