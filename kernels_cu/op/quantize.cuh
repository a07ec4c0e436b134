// Quantization to MXFP4 and back: e2m1 codes under one ue8m0 scale per 32 values, by the floor rule of OCP MX v1.0, 6.3.
#pragma once

#include <cstdint>

#include "../tile/format.cuh"
#include "../tile/run.cuh"
#include "../tile/scale.cuh"
#include "../tile/shared.cuh"

namespace op {

constexpr int quantize_threads = 256;
constexpr int quantize_tile = quantize_threads / 32 * tile::run_values;   // values of a block of threads

// codes[count / 2] and scales[count / 32] of x[count]; count is a multiple of 32. Each warp takes a run of 1024 values, all
// of whose loads start before the first is used.
template <class Element>
__device__ inline void quantize_mxfp4(const Element *x, uint32_t *codes, uint8_t *scales, size_t count) {
    using Run = tile::Run<Element>;
    const size_t first = (size_t(blockIdx.x) * (quantize_threads / 32) + threadIdx.x / 32) * tile::run_values;
    if (first >= count) return;
    const int here = min(count - first, size_t(tile::run_values));

    uint4 chunks[Run::items];
#pragma unroll
    for (int i = 0; i < Run::items; ++i)
        chunks[i] = Run::value(i) < here ? __ldg(reinterpret_cast<const uint4 *>(x + first + Run::value(i))) : uint4{};

    uint32_t codes_of[Run::words], scale_of[Run::items];
#pragma unroll
    for (int w = 0; w < Run::words; ++w) {
        constexpr int word_items = Run::items / Run::words;   // 2 or 1 items make a word of eight codes
        float scaled[8];
        uint32_t finite = 0xffffffffu;
#pragma unroll
        for (int part = 0; part < word_items; ++part) {
            const int item = w * word_items + part;
            float values[Run::lane_values];
            tile::unpack(chunks[item], values, Element{});
            scale_of[item] = tile::e2m1_scale(Run::block_amax(values));
            const float reciprocal = tile::ue8m0_reciprocal(scale_of[item]);
#pragma unroll
            for (int j = 0; j < Run::lane_values; ++j) scaled[part * Run::lane_values + j] = values[j] * reciprocal;
            if (scale_of[item] == tile::ue8m0_nan) finite &= ~(Run::item_codes << (16 * part));
        }
        codes_of[w] = ptx::cvt_rn_satfinite_e2m1x8_f32(scaled) & finite;
    }
    Run::store_codes(codes + first / 8, codes_of, here);
    Run::store_scales(scales + first / tile::mx_block, scale_of, here / tile::mx_block);
}

// x[count] from codes[count / 2] and scales[count / 32]: exact in f32, rounded once to f16 or bf16.
template <class Element>
__device__ inline void dequantize_mxfp4(const uint8_t *codes, const uint8_t *scales, Element *x, size_t count) {
    using Run = tile::Run<Element>;
    const size_t first = (size_t(blockIdx.x) * (quantize_threads / 32) + threadIdx.x / 32) * tile::run_values;
    if (first >= count) return;
    const int here = min(count - first, size_t(tile::run_values));

    uint32_t item_codes[Run::items], item_scales[Run::items];
#pragma unroll
    for (int i = 0; i < Run::items; ++i) {
        if (Run::value(i) >= here) continue;
        const uint8_t *source = codes + (first + Run::value(i)) / 2;
        if constexpr (Run::lane_values == 8) item_codes[i] = __ldg(reinterpret_cast<const uint32_t *>(source));
        else item_codes[i] = __ldg(reinterpret_cast<const uint16_t *>(source));
        item_scales[i] = __ldg(scales + first / tile::mx_block + Run::block(i));
    }
#pragma unroll
    for (int i = 0; i < Run::items; ++i) {
        if (Run::value(i) >= here) continue;
        const float scale = ptx::cvt_f32_ue8m0(item_scales[i]);
        float values[Run::lane_values];
        static_for<Run::lane_values / 2>([&](auto byte) {
            const uint32_t pair = ptx::cvt_rn_f16x2_e2m1x2<byte>(item_codes[i]);
            const float2 unscaled = __half22float2(*reinterpret_cast<const __half2 *>(&pair));
            values[2 * byte] = unscaled.x * scale;
            values[2 * byte + 1] = unscaled.y * scale;
        });
        *reinterpret_cast<uint4 *>(x + first + Run::value(i)) = tile::pack(values, Element{});
    }
}

}  // namespace op
