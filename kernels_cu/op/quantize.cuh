// Quantization to the MX formats and NVFP4 and back, of blocks along the last axis.
#pragma once

#include <cstdint>

#include "../tile/format.cuh"
#include "../tile/narrow.cuh"
#include "../tile/run.cuh"
#include "../tile/scale.cuh"

namespace op {

constexpr int quantize_threads = 256;
constexpr int quantize_tile = quantize_threads / 32 * tile::run_values;   // values of a block of threads

// The first value of this warp's run.
__device__ inline size_t first_of_run() {
    return (size_t(blockIdx.x) * (quantize_threads / 32) + threadIdx.x / 32) * tile::run_values;
}

// Loads this lane's values of a run, all of them before the first is used; those past `here` are zeros.
template <class Element>
__device__ inline void load_run(const Element *run, int here, tile::Share<Element> (&shares)[tile::run_items]) {
#pragma unroll
    for (int item = 0; item < tile::run_items; ++item) {
        if (tile::run_value(item) < here) shares[item].load(run + tile::run_value(item));
        else shares[item].clear();
    }
}

// Codes and scales [count / 32] of x[count] in an MX format; count is a multiple of 32.
template <class Format, class Element>
__device__ inline void quantize_mx(const Element *x, uint32_t *codes, uint8_t *scales, size_t count, tile::ScaleRule rule) {
    using Blocks = tile::RunBlocks<tile::mx_block>;
    const size_t first = first_of_run();
    if (first >= count) return;
    const int here = min(count - first, size_t(tile::run_values));

    tile::Share<Element> shares[tile::run_items];
    load_run(x + first, here, shares);
    tile::Codes<Format::bits> run_codes[tile::run_items];
    uint32_t run_scales[tile::run_items];
#pragma unroll
    for (int item = 0; item < tile::run_items; ++item) {
        const uint32_t scale = tile::mx_scale<Format>(Blocks::amax(shares[item].amax()), rule);
        run_scales[item] = scale;
        run_codes[item] = shares[item].template encode<Format>(tile::ue8m0_reciprocal(scale));
#pragma unroll
        for (uint32_t &word : run_codes[item].word)
            if (scale == tile::ue8m0_nan) word = 0;
    }
    tile::store_codes(codes + first * Format::bits / 32, run_codes, here);
    Blocks::store_scales(scales + first / tile::mx_block, run_scales, here / tile::mx_block);
}

// x[count] of codes and scales in an MX format: exact in f32 (subnormals too), rounded once to f16 or bf16.
template <class Format, class Element>
__device__ inline void dequantize_mx(const uint32_t *codes, const uint8_t *scales, Element *x, size_t count) {
    using Chunks = tile::Chunks<Element>;
    const size_t first = first_of_run();
    if (first >= count) return;
    const int here = min(count - first, size_t(tile::run_values));

    tile::Codes<Format::bits> run_codes[Chunks::items];
    uint32_t run_scales[Chunks::items];
#pragma unroll
    for (int item = 0; item < Chunks::items; ++item) {
        if (Chunks::first(item) >= here) continue;
        Chunks::load_codes(codes + first * Format::bits / 32, item, run_codes[item]);
        run_scales[item] = __ldg(scales + first / tile::mx_block + Chunks::template block_index<tile::mx_block>(item));
    }
#pragma unroll
    for (int item = 0; item < Chunks::items; ++item) {
        if (Chunks::first(item) >= here) continue;
        float values[8];
        Format::decode(run_codes[item], values);
        const float scale = ptx::cvt_f32_ue8m0(run_scales[item]);
#pragma unroll
        for (float &value : values) value *= scale;
        Chunks::store(x + first, item, values);
    }
}

// Codes [count / 2] and ue4m3 scales [count / 16] of x[count] in NVFP4 under a given global scale; count is a multiple of
// 16. With `four_over_six` a block's largest value goes to 4 instead of 6 where that makes the squared error smaller.
template <class Element>
__device__ inline void quantize_nvfp4(const Element *x, float global_scale, uint32_t *codes, uint8_t *scales, size_t count,
                                      bool four_over_six) {
    using Blocks = tile::RunBlocks<tile::nvfp4_block>;
    const size_t first = first_of_run();
    if (first >= count) return;
    const int here = min(count - first, size_t(tile::run_values));
    const tile::Divisor global_divisor(global_scale);

    tile::Share<Element> shares[tile::run_items];
    load_run(x + first, here, shares);
    tile::Codes<4> run_codes[tile::run_items];
    uint32_t run_scales[tile::run_items];
#pragma unroll
    for (int item = 0; item < tile::run_items; ++item) {
        float values[8];
        shares[item].unpack(values);
        const tile::Nvfp4Block block(Blocks::amax(shares[item].amax()));
        tile::Nvfp4Scale scale = block.scale(tile::Nvfp4Target::six, global_divisor, global_scale);
        float scaled[8];
        run_codes[item] = tile::encode_nvfp4(values, scale, scaled);
        if (four_over_six) {   // the whole warp, for the exchange
            const tile::Nvfp4Scale other = block.scale(tile::Nvfp4Target::four, global_divisor, global_scale);
            const float error = Blocks::sum(tile::squared_error(scaled, run_codes[item], scale));
            const tile::Codes<4> other_codes = tile::encode_nvfp4(values, other, scaled);
            const float other_error = Blocks::sum(tile::squared_error(scaled, other_codes, other));
            if (scale.step != 0.0f && other_error < error) {
                scale = other;
                run_codes[item] = other_codes;
            }
        }
        run_scales[item] = scale.code;
    }
    tile::store_codes(codes + first / 8, run_codes, here);
    Blocks::store_scales(scales + first / tile::nvfp4_block, run_scales, here / tile::nvfp4_block);
}

// x[count] of NVFP4 codes and scales: e2m1 times f32(global scale x scale), both products in f32, rounded once more to f16
// or bf16.
template <class Element>
__device__ inline void dequantize_nvfp4(const uint32_t *codes, const uint8_t *scales, float global_scale, Element *x, size_t count) {
    using Chunks = tile::Chunks<Element>;
    const size_t first = first_of_run();
    if (first >= count) return;
    const int here = min(count - first, size_t(tile::run_values));

    tile::Codes<4> run_codes[Chunks::items];
    uint32_t run_scales[Chunks::items];
#pragma unroll
    for (int item = 0; item < Chunks::items; ++item) {
        if (Chunks::first(item) >= here) continue;
        Chunks::load_codes(codes + first / 8, item, run_codes[item]);
        run_scales[item] = __ldg(scales + first / tile::nvfp4_block + Chunks::template block_index<tile::nvfp4_block>(item));
    }
#pragma unroll
    for (int item = 0; item < Chunks::items; ++item) {
        if (Chunks::first(item) >= here) continue;
        float values[8];
        tile::E2m1::decode(run_codes[item], values);
        const float step = tile::nvfp4_step(run_scales[item], global_scale);
#pragma unroll
        for (float &value : values) value *= step;
        Chunks::store(x + first, item, values);
    }
}

}  // namespace op
