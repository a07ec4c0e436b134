// The ending of a kernel: stores float32 values of rows from registers, in 16 bits or in codes and scales of a block
// format, with the same bytes as `quantize`.
//
// A lane has a share of a row, 8 or 16 consecutive values (`groups` of eight). Neighboring lanes have neighboring
// shares. Shares begin at multiples of their length. The lanes of a block (32 values of the MX formats, 16 of NVFP4)
// are consecutive and begin at a multiple of their number: with 8 values, lanes 4 i .. 4 i + 3, or 2 i and 2 i + 1.
// Kernels that loop over rows have this layout; tile::AccumulatorStaging converts accumulators to it. All 32 lanes call
// these functions; a lane whose row does not exist passes present = false.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "../kernel.cuh"
#include "../ptx/warp.cuh"
#include "../tile/format.cuh"
#include "../tile/narrow.cuh"
#include "../tile/rows.cuh"
#include "../tile/run.cuh"
#include "../tile/scale.cuh"
#include "../tile/scale_places.cuh"

namespace op {

// ---------------------------------------------------------------------------------------------------------------------
// Codes of values in registers

// The codes of a lane's share in an MX format. Returns the scale of its block to all lanes of the block. A block that
// is not finite has codes of 0.
template <class Format, int groups>
__device__ inline uint32_t encode_share(const float (&values)[groups][8], tile::ScaleRule rule,
                                        tile::LaneCodes<Format::bits, groups> &codes) {
    float amax = tile::amax_of(values[0]);
#pragma unroll
    for (int i = 1; i < groups; ++i) amax = ptx::max_nan_f32(amax, tile::amax_of(values[i]));
    const uint32_t scale = tile::mx_scale<Format>(tile::RunBlocks<tile::mx_block, 8 * groups>::amax(amax), rule);
    tile::Codes<Format::bits> of_group[groups];
#pragma unroll
    for (int i = 0; i < groups; ++i) of_group[i] = tile::encode_scaled<Format>(values[i], scale);
    codes = tile::LaneCodes<Format::bits, groups>(of_group);
    if (scale == tile::ue8m0_nan) codes.clear();
    return scale;
}

// The same in NVFP4. If two lanes share a block, both encode all of it.
template <bool better_of_two, int groups>
__device__ inline uint32_t encode_nvfp4_share(const float (&values)[groups][8], const tile::Nvfp4Global &global,
                                              tile::LaneCodes<4, groups> &codes) {
    float block[2][8];
    const bool upper = tile::gather_sixteen(values, block);
    tile::Codes<4> of_block[2];
    const float amax = ptx::max_nan_f32(tile::amax_of(block[0]), tile::amax_of(block[1]));
    const uint32_t scale = tile::encode_nvfp4_block<better_of_two>(block, amax, global, of_block).code;
    codes.word[0] = (upper ? of_block[1] : of_block[0]).word[0];
    if constexpr (groups == 2) codes.word[1] = of_block[1].word[0];
    return scale;
}

// ---------------------------------------------------------------------------------------------------------------------
// Rows in memory

// The block formats of outputs, as numbered by the scalar of entries.
enum class EndingFormat { none, mxfp8, mxfp4, nvfp4 };

// Quantized rows: codes, a row `code_bytes` behind the one before, and scales. `rule` is the number of a scale rule of
// the format, `global` NVFP4's global scale. Both are 16-byte aligned; rows of codes begin at multiples of a block's
// bytes.
struct QuantizedRows {
    EndingFormat format;
    uint8_t *codes, *scales;
    int64_t code_bytes;
    tile::ScalePlaces places;
    int rule;
    float global_scale;

    // Quantizes and stores a lane's share from `column` on, of a row of `columns` values. Values past the end count as
    // zeros. Nothing is stored if `present` is false, nor for blocks past the end.
    template <int groups>
    __device__ void store(int64_t row, int column, int columns, bool present, float (&values)[groups][8]) const {
        if (column + 8 * groups > columns) {
#pragma unroll
            for (int i = 0; i < 8 * groups; ++i)
                if (column + i >= columns) values[i / 8][i % 8] = 0.0f;
        }
        if (format == EndingFormat::nvfp4) {
            const tile::Nvfp4Global global(global_scale);
            tile::LaneCodes<4, groups> share;
            uint32_t scale;
            tile::with_nvfp4_rule(
                rule, [&](auto better_of_two) { scale = encode_nvfp4_share<better_of_two>(values, global, share); });
            put<4, tile::nvfp4_block, groups>(row, column, columns, present, share, scale);
        } else if (format == EndingFormat::mxfp4) {
            store_mx<tile::E2m1>(row, column, columns, present, values);
        } else {
            store_mx<tile::E4m3>(row, column, columns, present, values);
        }
    }

    // Stores scales of 0, as `quantize` does, for the rows from `rows` on that pad the last tile of a 128x4 layout, and
    // the blocks first_block .. end_block - 1. Called by all threads of the block that has the last rows.
    __device__ void fill_tile(int64_t rows, int64_t first_block, int64_t end_block) const {
        if (!places.swizzled) return;
        const int64_t padded = (rows + tile::scale_tile_rows - 1) / tile::scale_tile_rows * tile::scale_tile_rows;
        if (end_block >= places.blocks) end_block = places.padded_blocks();
        const int64_t width = end_block - first_block;
        for (int64_t i = threadIdx.x; i < (padded - rows) * width; i += blockDim.x)
            scales[places.at(rows + i / width, first_block + i % width)] = 0;
    }

private:
    template <class Format, int groups>
    __device__ void store_mx(int64_t row, int column, int columns, bool present,
                             const float (&values)[groups][8]) const {
        tile::LaneCodes<Format::bits, groups> share;
        const uint32_t scale = encode_share<Format>(values, tile::ScaleRule(rule), share);
        put<Format::bits, tile::mx_block, groups>(row, column, columns, present, share, scale);
    }

    template <int bits, int block, int groups>
    __device__ void put(int64_t row, int column, int columns, bool present, const tile::LaneCodes<bits, groups> &share,
                        uint32_t scale) const {
        const int padded = ceil_div(columns, block) * block;
        if (!present || column >= padded) return;
        uint8_t *target = codes + row * code_bytes + column * bits / 8;
        const uint32_t (&word)[tile::LaneCodes<bits, groups>::words] = share.word;
        if constexpr (bits * groups == 4) *reinterpret_cast<uint32_t *>(target) = word[0];
        else if constexpr (bits * groups == 8) tile::store(target, uint2{word[0], word[1]});
        else tile::store(target, uint4{word[0], word[1], word[2], word[3]});
        if (column % block) return;   // the first lane of the block stores the scale
        const int at = column / block;
        scales[places.at(row, at)] = scale;
        if (places.swizzled && column + block >= padded)
            for (int64_t behind = at + 1; behind < places.padded_blocks(); ++behind) scales[places.at(row, behind)] = 0;
    }
};

// Rows of floats in one of three types; the other pointers are null. `stride` elements from row to row.
template <class Bf16, class F16, class F32>
struct AnyRows {
    Bf16 *bf16;
    F16 *f16;
    F32 *f32;
    int64_t stride;

    __device__ bool there() const { return bf16 || f16 || f32; }
};

// The stride of the array that is not null, of arrays in bf16, f16 and f32.
__device__ inline int64_t stride_of(const __nv_bfloat16 *bf16, const __half *f16, int64_t bf16_stride,
                                    int64_t f16_stride, int64_t f32_stride) {
    return bf16 ? bf16_stride : f16 ? f16_stride : f32_stride;
}

using FloatRows = AnyRows<const __nv_bfloat16, const __half, const float>;
using OutputRows = AnyRows<__nv_bfloat16, __half, float>;

__device__ inline bool is_chunk(const void *address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; }

template <class Element, int groups>
__device__ inline void load_share(const Element *source, int here, float (&values)[groups][8]) {
    const bool whole = here >= 8 * groups && is_chunk(source);
#pragma unroll
    for (int i = 0; i < groups; ++i) {
        tile::Eight<Element> eight;
        if (whole) eight.load(source + 8 * i);
        else eight.load(source + 8 * i, here - 8 * i);
        eight.unpack(values[i]);
    }
}

// A lane's share of a row of `columns` values from `column` on; zeros past the end.
template <int groups>
__device__ inline void load_share(const FloatRows &rows, int64_t row, int column, int columns,
                                  float (&values)[groups][8]) {
    const int64_t at = row * rows.stride + column;
    if (rows.bf16) load_share(rows.bf16 + at, columns - column, values);
    else if (rows.f16) load_share(rows.f16 + at, columns - column, values);
    else load_share(rows.f32 + at, columns - column, values);
}

template <class Element, int groups>
__device__ inline void store_share(Element *target, int here, const float (&values)[groups][8]) {
    if (here >= 8 * groups && is_chunk(target)) {
        constexpr int count = tile::elements_per_chunk<Element>;
#pragma unroll
        for (int i = 0; i < 8 * groups; i += count) {
            float some[count];
#pragma unroll
            for (int j = 0; j < count; ++j) some[j] = values[(i + j) / 8][(i + j) % 8];
            tile::store(target + i, tile::pack(some, Element{}));
        }
    } else {
#pragma unroll
        for (int i = 0; i < 8 * groups; ++i)
            if (i < here) target[i] = Element(values[i / 8][i % 8]);
    }
}

// Stores a lane's share of a row to any address, rounded to nearest, ties to even. Values past the end are not stored.
template <int groups>
__device__ inline void store_share(const OutputRows &rows, int64_t row, int column, int columns,
                                   const float (&values)[groups][8]) {
    const int64_t at = row * rows.stride + column;
    if (rows.bf16) store_share(rows.bf16 + at, columns - column, values);
    else if (rows.f16) store_share(rows.f16 + at, columns - column, values);
    else if (rows.f32) store_share(rows.f32 + at, columns - column, values);
}

}   // namespace op
