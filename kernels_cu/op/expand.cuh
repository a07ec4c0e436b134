// Rows of pages expanded to 16 bits (codes times scales) and stored consecutively, for attention of many queries.
#pragma once

#include <cstdint>

#include "../kernel.cuh"
#include "../ptx/atom.cuh"
#include "../ptx/cvt.cuh"
#include "../tile/cached_rows.cuh"
#include "../tile/format.cuh"
#include "../tile/narrow.cuh"
#include "../tile/scale.cuh"
#include "paged.cuh"

namespace op {

constexpr int expand_threads = 256;

using tile::RowFormat;

// Eight values of a row from `column` on, as 16 bytes. A product is exact if Element can represent it.
template <class Element>
__device__ inline uint4 expand_eight(RowFormat format, const char *codes, const char *scales, int column) {
    if (format == RowFormat::plain) return *reinterpret_cast<const uint4 *>(codes + 2 * column);
    float values[8], factor;
    if (format == RowFormat::mxfp8) {
        const uint2 words = *reinterpret_cast<const uint2 *>(codes + column);
        tile::E4m3::decode({{words.x, words.y}}, values);
    } else {
        tile::E2m1::decode({{*reinterpret_cast<const uint32_t *>(codes + column / 2)}}, values);
    }
    if (format == RowFormat::nvfp4)
        factor = tile::nvfp4_step(static_cast<uint8_t>(scales[column / tile::nvfp4_block]), 1.0f);
    else factor = ptx::cvt_f32_ue8m0(static_cast<uint8_t>(scales[column / tile::mx_block]));
#pragma unroll
    for (float &value : values) value *= factor;
    return tile::pack(values, Element{});
}

// The bits of a 16-bit value's exponent; if all are set, it is infinite or NaN.
template <class Element>
constexpr uint32_t exponent_bits = tile::is_bf16<Element> ? 0x7f80u : 0x7c00u;

// Replaces infinities and NaN by 0. Returns whether there were any.
template <class Element>
__device__ inline bool drop_nonfinite(uint4 &eight) {
    constexpr uint32_t low = exponent_bits<Element>, high = low << 16;
    bool any = false;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        uint32_t &pair = reinterpret_cast<uint32_t *>(&eight)[i];
        if ((pair & low) == low) pair &= 0xffff0000u, any = true;
        if ((pair & high) == high) pair &= 0x0000ffffu, any = true;
    }
    return any;
}

// out[heads][sequences][keys][dim]: key j of sequence s from its page if j < key_ends[s]; other rows are not written.
// starts and ends, or null, get where the keys of sequences begin and end in rows [sequences][keys]. cleared[heads]
// [sequences], or null, becomes 0. If marks[heads][sequences] is not null, values that are not finite become 0, and the
// marks of their heads and sequences 1. The grid is keys, sequences, heads.
template <class Element>
__device__ inline void expand_pages(RowFormat format, const PagedRows &rows, const PageTable &table,
                                    const int *key_ends, Element *out, int *starts, int *ends, uint32_t *cleared,
                                    uint32_t *marks, int sequences, int keys, int dim) {
    const int sequence = blockIdx.y, head = blockIdx.z, eights = dim / 8, step = expand_threads / eights;
    const int end = min(key_ends[sequence], keys);
    if (starts && blockIdx.x == 0 && head == 0 && threadIdx.x == 0) {
        starts[sequence] = sequence * keys;
        ends[sequence] = sequence * keys + end;
    }
    if (cleared && blockIdx.x == 0 && threadIdx.x == 0) cleared[head * sequences + sequence] = 0;
    bool any = false;
    const int column = threadIdx.x % eights * 8, first = blockIdx.x * tile::tile_keys;
    if (threadIdx.x / eights >= step) return;
    for (int key = first + threadIdx.x / eights; key < min(first + tile::tile_keys, end); key += step) {
        const PageTable::Place place = table.place(key);
        const char *codes = rows.codes + place.page * rows.code_strides.page + place.row * rows.code_strides.token;
        const char *scales = rows.scales + place.page * rows.scale_strides.page + place.row * rows.scale_strides.token;
        Element *target = out + ((size_t(head) * sequences + sequence) * keys + key) * dim + column;
        uint4 eight = expand_eight<Element>(format, codes, scales, column);
        if (marks) any |= drop_nonfinite<Element>(eight);
        *reinterpret_cast<uint4 *>(target) = eight;
    }
    if (any) ptx::red_relaxed_or(marks + head * sequences + sequence, 1);
}

}   // namespace op
