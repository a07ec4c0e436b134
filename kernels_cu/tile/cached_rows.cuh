// Rows of keys and of values as caches hold them, 16 keys at a time in shared memory, and how a warp takes them from there as B of
// its MMAs: in 16 bits, codes times scales, every product exact.
//
// A row is the D values of a token, its scales lie along it. The depth k of Q K^T is D: lane t of a quad gives the values from
// t D / 4 on, eight of them to two MMAs, value j of the eight beside value j + 4. The depth of P V are the keys, as accumulators
// of S leave them; its columns are those of O, of which lane group g has the values from g D / 8 on. Every format has the same
// values in the same places, so that caches of the same values give the same sums, bit for bit, on every machine.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "../ptx/cp_async.cuh"
#include "../ptx/portable/cp_async.cuh"
#include "../ptx/cvt.cuh"
#include "../ptx/warp.cuh"
#include "format.cuh"
#include "fragment.cuh"

namespace tile {

constexpr int cached_rows = 16;   // keys of a unit

__device__ inline uint32_t multiply_pair(uint32_t a, uint32_t b, __nv_bfloat16) { return ptx::mul_bf16x2(a, b); }
__device__ inline uint32_t multiply_pair(uint32_t a, uint32_t b, __half) { return ptx::portable::mul_f16x2(a, b); }

// What a cache holds. bits: of a value; block: values to a scale, 0 without. `lift` takes expanded values to what they stand for.
// expand() makes pairs of Element of codes and of the pair of scales that scale_pair() makes of two bytes.

template <class Element_>
struct CachedPlain {
    using Element = Element_;
    static constexpr int bits = 16, block = 0;
    static constexpr float lift = 1.0f;
};

// Pairs of nibbles j of both halves of a word, j = 0 .. 3, with the bits of e2m1 where those of a 16-bit float with its exponent
// and mantissa are: sign on sign, the other three from the lowest bit of the exponent but one on.
template <int mantissa>
__device__ inline void spread_e2m1(uint32_t (&pairs)[4], uint32_t word) {
    constexpr uint32_t magnitude = 0x00070007u << (mantissa - 1), sign = 0x80008000u;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const int up = mantissa - 1 - 4 * j;
        const uint32_t moved = up >= 0 ? word << up : word >> -up;
        pairs[j] = (moved & magnitude) | ((word << (12 - 4 * j)) & sign);
    }
}

// e2m1 times ue4m3: values times 2^-7, of which f16 holds every one.
template <class Element_>
struct CachedNvfp4 {
    using Element = Element_;
    static constexpr int bits = 4, block = 16;
    static constexpr float lift = 0x1p7f;

    __device__ static uint32_t scale_pair(uint32_t low, uint32_t high) {
        const uint32_t pair = ptx::cvt_rn_f16x2_ue4m3x2(low | high << 8);
        if constexpr (is_bf16<Element>) {   // e2m1 stands for 2^-126 times itself there
            const float2 scales = unpack_pair(pair, __half{});
            return ptx::cvt_rn_bf16x2_f32(scales.y * 0x1p119f, scales.x * 0x1p119f);
        } else {   // 2^-14
            return multiply_pair(pair, 0x58005800u, __half{});
        }
    }
    __device__ static void expand(uint32_t (&pairs)[4], uint32_t word, uint32_t scales) {
        spread_e2m1<is_bf16<Element> ? 7 : 10>(pairs, word);
#pragma unroll
        for (uint32_t &pair : pairs) pair = multiply_pair(pair, scales, Element{});
    }
};

// e2m1 times ue8m0, in bf16: exact for scales from 2^-117 to 2^119.
struct CachedMxfp4 {
    using Element = __nv_bfloat16;
    static constexpr int bits = 4, block = 32;
    static constexpr float lift = 1.0f;

    __device__ static uint32_t scale_pair(uint32_t low, uint32_t high) { return ptx::cvt_rn_bf16x2_ue8m0x2(low | high << 8); }
    __device__ static void expand(uint32_t (&pairs)[4], uint32_t word, uint32_t scales) {
        spread_e2m1<7>(pairs, word);
#pragma unroll
        for (uint32_t &pair : pairs) pair = ptx::mul_bf16x2(ptx::mul_bf16x2(pair, 0x7e807e80u), scales);   // 2^126
    }
};

// e4m3 times ue8m0, in bf16, likewise.
struct CachedMxfp8 {
    using Element = __nv_bfloat16;
    static constexpr int bits = 8, block = 32;
    static constexpr float lift = 1.0f;

    __device__ static uint32_t scale_pair(uint32_t low, uint32_t high) { return ptx::cvt_rn_bf16x2_ue8m0x2(low | high << 8); }
    // The lower two bytes of a word.
    __device__ static uint32_t expand(uint32_t codes, uint32_t scales) {
        const float2 values = unpack_pair(ptx::cvt_rn_f16x2_e4m3x2(codes), __half{});
        return ptx::mul_bf16x2(ptx::cvt_rn_bf16x2_f32(values.y, values.x), scales);
    }
};

// Bytes of scales, or nothing.
template <int count>
struct RowScales {
    uint8_t bytes[count];
};
template <>
struct RowScales<0> {};

// 16 rows of `dim` values, those of keys or of values. Rows are copied chunk by chunk to places where the reads below meet no bank
// conflict; rows of values stand so that a lane finds its two neighbouring keys four rows apart.
template <class Format_, int dim_, bool values>
struct alignas(16) CachedUnit {
    using Format = Format_;
    using Element = typename Format::Element;
    static constexpr int dim = dim_;
    static constexpr int row_bytes = dim * Format::bits / 8, row_chunks = row_bytes / 16;
    static constexpr int scale_bytes = Format::block ? dim / (Format::block ? Format::block : 1) : 0;   // of a row
    static_assert(dim % 64 == 0, "eight lane groups have whole groups of eight values");

    uint4 chunks[cached_rows * row_chunks];
    [[no_unique_address]] RowScales<cached_rows * scale_bytes> scales;

    // The key of a row.
    __host__ __device__ static constexpr int key_of(int row) {
        return values ? row / 8 * 8 + row % 4 * 2 + row / 4 % 2 : row;
    }

    // Which chunk of a row stands in a place, and the place of a chunk.
    static constexpr int lanes = values ? 8 : 4, share = row_chunks / lanes;   // chunks of one of so many lanes; 0: a part of one
    __host__ __device__ static constexpr int turn(int row) {
        if (values) return share ? 2 * (row % 4) : row_chunks == 4 ? row / 2 % 2 * 2 : 0;
        return share > 1 ? row % 2 * 4 : 0;
    }
    __host__ __device__ static constexpr int chunk_at(int row, int place) {
        const int straight = place ^ turn(row);
        return share ? straight % lanes * share + straight / lanes : straight;
    }
    __host__ __device__ static constexpr int place_of(int row, int chunk) {
        return (share ? chunk % (share ? share : 1) * lanes + chunk / (share ? share : 1) : chunk) ^ turn(row);
    }

    // Calls body(offset, key, chunk) for this lane's chunks of the unit: bytes behind its first, key and chunk of a row.
    template <bool unrolled, class Body>
    __device__ static void for_chunks(Body &&body) {
        constexpr int count = cached_rows * row_chunks / 32, step = 32 / row_chunks;   // rows from one of a lane to the next
        const int row = ptx::laneid() / row_chunks, place = ptx::laneid() % row_chunks;
#pragma unroll (unrolled ? count : 1)
        for (int i = 0; i < count; ++i) {
            const int at = step ? row + i * step : i * 32 / row_chunks;
            const int chunk = chunk_at(at, step ? place : (i * 32 + ptx::laneid()) % row_chunks);
            body(512 * i + 16 * ptx::laneid(), key_of(at), chunk);
        }
    }

    // Starts copying: `columns` chunks of each row, of which the first begins at `first` and others `token` bytes apart; zeros
    // behind them.
    __device__ void copy(int columns, const char *first, uint32_t token) {
        const uint32_t target = static_cast<uint32_t>(__cvta_generic_to_shared(chunks));
        for_chunks<true>([&](int offset, int key, int chunk) {
            ptx::cp_async_cg_16(target + offset, first + (key * token + 16 * chunk), chunk < columns);
        });
    }

    // The same from where row_of(key) says, zeros where that is null.
    template <class RowOf>
    __device__ void copy(int columns, RowOf &&row_of) {
        const uint32_t target = static_cast<uint32_t>(__cvta_generic_to_shared(chunks));
        for_chunks<false>([&](int offset, int key, int chunk) {
            const char *source = row_of(key);
            ptx::cp_async_cg_16(target + offset, source + (source ? 16 * chunk : 0), source && chunk < columns);
        });
    }

    // Scales, `present` bytes of each row, where rows begin at multiples of scale_bytes.
    __device__ void copy_scales(int present, const char *first, uint32_t token) {
        if constexpr (scale_bytes >= 4) {
            if (ptx::laneid() >= cached_rows) return;
            const uint32_t target = static_cast<uint32_t>(__cvta_generic_to_shared(scales.bytes));
            ptx::portable::cp_async_ca<scale_bytes>(target + ptx::laneid() * scale_bytes, first + key_of(ptx::laneid()) * token, present);
        }
    }

    // The same of scales, `present` bytes of each row. aligned: whether each row begins at a multiple of scale_bytes.
    template <class RowOf>
    __device__ void copy_scales(int present, bool aligned, RowOf &&row_of) {
        if constexpr (scale_bytes > 0) {
            if (ptx::laneid() >= cached_rows) return;
            const char *source = row_of(key_of(ptx::laneid()));
            uint8_t *target = scales.bytes + ptx::laneid() * scale_bytes;
            if constexpr (scale_bytes >= 4) {
                if (aligned) {
                    ptx::portable::cp_async_ca<scale_bytes>(static_cast<uint32_t>(__cvta_generic_to_shared(target)), source, source ? present : 0);
                    return;
                }
            }
#pragma unroll 1
            for (int i = 0; i < scale_bytes; ++i) target[i] = source && i < present ? source[i] : 0;
        }
    }

    __device__ const uint4 &chunk(int row, int chunk) const { return chunks[row * row_chunks + place_of(row, chunk)]; }

    // The eight codes `eight` of a lane's share of a row, in words; `lane` is that of the `lanes`.
    static constexpr int eight_words = Format::bits / 4;
    __device__ void load(uint32_t (&words)[eight_words], int row, int lane, int eight) const {
        if constexpr (Format::bits == 16) {
            const uint4 all = chunk(row, lane * share + eight);
            words[0] = all.x, words[1] = all.y, words[2] = all.z, words[3] = all.w;
        } else {
            constexpr int lane_words = row_bytes / 4 / lanes;
            const int word = lane * lane_words + eight * eight_words;
            const uint32_t *first = reinterpret_cast<const uint32_t *>(&chunk(row, word / 4)) + word % 4;
#pragma unroll
            for (int i = 0; i < eight_words; ++i) words[i] = first[i];
        }
    }
    __device__ uint32_t scale(int row, int lane, int eight) const {
        if constexpr (scale_bytes == 0) return 0;
        else return scales.bytes[row * scale_bytes + (lane * (dim / lanes) + 8 * eight) / Format::block];
    }
    static constexpr int scale_eights = Format::block ? Format::block / 8 : 1;   // groups of eight values to a scale

    // Keys: calls body(step, b) for B of the MMAs `step` with the keys 8 half .. 8 half + 7 of the unit.
    template <class Body>
    __device__ void for_keys(int half, Body &&body) const {
        static_assert(!values);
        const int row = 8 * half + ptx::laneid() / 4, lane = ptx::laneid() % 4;
        uint32_t scale_pair = 0;
#pragma unroll
        for (int eight = 0; eight < dim / 32; ++eight) {
            uint32_t words[eight_words], pairs[4];
            load(words, row, lane, eight);
            if constexpr (Format::block > 0) {
                if (eight % scale_eights == 0) {
                    const uint32_t byte = scale(row, lane, eight);
                    scale_pair = Format::scale_pair(byte, byte);
                }
            }
            if constexpr (Format::bits == 16) {
#pragma unroll
                for (int i = 0; i < 4; ++i) pairs[i] = __byte_perm(words[i / 2], words[2 + i / 2], i % 2 ? 0x7632 : 0x5410);
            } else if constexpr (Format::bits == 8) {
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    pairs[i] = Format::expand(__byte_perm(words[0], words[1], 0x0040 + 0x0011 * i), scale_pair);
            } else {
                Format::expand(pairs, words[0], scale_pair);
            }
            const FragmentB first = {pairs[0], pairs[1]}, second = {pairs[2], pairs[3]};
            body(2 * eight, first);
            body(2 * eight + 1, second);
        }
    }

    // Values: calls body(j, b) for B of the 16 keys and column g dim / 8 + j of lane group g.
    template <class Body>
    __device__ void for_values(Body &&body) const {
        static_assert(values);
        const int group = ptx::laneid() / 4, row = ptx::laneid() % 4;
        uint32_t scale_pairs[2] = {};
#pragma unroll
        for (int eight = 0; eight < dim / 64; ++eight) {
            uint32_t pairs[2][8];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                uint32_t first[eight_words], second[eight_words];   // of two neighbouring keys
                load(first, 8 * half + row, group, eight);
                load(second, 8 * half + 4 + row, group, eight);
                if constexpr (Format::block > 0) {
                    if (eight % scale_eights == 0)
                        scale_pairs[half] = Format::scale_pair(scale(8 * half + row, group, eight), scale(8 * half + 4 + row, group, eight));
                }
                if constexpr (Format::bits == 16) {
#pragma unroll
                    for (int i = 0; i < 8; ++i) pairs[half][i] = __byte_perm(first[i / 2], second[i / 2], i % 2 ? 0x7632 : 0x5410);
                } else if constexpr (Format::bits == 8) {
#pragma unroll
                    for (int i = 0; i < 8; ++i)
                        pairs[half][i] = Format::expand(__byte_perm(first[i / 4], second[i / 4], 0x0040 + 0x0011 * (i % 4)), scale_pairs[half]);
                } else {
                    uint32_t some[4];
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        Format::expand(some, __byte_perm(first[0], second[0], i ? 0x7632 : 0x5410), scale_pairs[half]);
#pragma unroll
                        for (int j = 0; j < 4; ++j) pairs[half][4 * i + j] = some[j];
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const FragmentB b = {pairs[0][i], pairs[1][i]};
                body(8 * eight + i, b);
            }
        }
    }
};

// Bits of B of for_values that belong to keys of which seen(key) is true.
struct PairMasks {
    uint32_t pair[2];
};
template <class Seen>
__device__ inline PairMasks pair_masks(Seen &&seen) {
    PairMasks masks;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int key = 8 * half + 2 * (ptx::laneid() % 4);
        masks.pair[half] = (seen(key) ? 0x0000ffffu : 0) | (seen(key + 1) ? 0xffff0000u : 0);
    }
    return masks;
}

// A of Q for for_keys: the rows g and g + 8 of lane group g; row_of(row) is where a row of `dim` values begins, null for zeros, of
// which `columns` are there, a multiple of eight.
template <class Element, int dim, class RowOf>
__device__ inline void load_queries(FragmentA (&a)[dim / 16], int columns, RowOf &&row_of) {
    const int lane = ptx::laneid() % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const Element *row = row_of(ptx::laneid() / 4 + 8 * half);
#pragma unroll
        for (int eight = 0; eight < dim / 32; ++eight) {
            const int column = lane * (dim / 4) + 8 * eight;
            uint4 chunk = {};
            if (row && column < columns) chunk = __ldg(reinterpret_cast<const uint4 *>(row + column));
            a[2 * eight][half] = __byte_perm(chunk.x, chunk.z, 0x5410);
            a[2 * eight][2 + half] = __byte_perm(chunk.x, chunk.z, 0x7632);
            a[2 * eight + 1][half] = __byte_perm(chunk.y, chunk.w, 0x5410);
            a[2 * eight + 1][2 + half] = __byte_perm(chunk.y, chunk.w, 0x7632);
        }
    }
}

// The first column of O that a lane has of its rows, as for_values makes them: column i of an accumulator pair j is column
// first + i dim / 8 + j.
template <int dim>
__device__ inline int first_value_column() { return ptx::laneid() % 4 * (dim / 4); }

__device__ inline void copy(Accumulator &to, const Accumulator &from) {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = from[i];
}

// The accumulators of a warp in shared memory, for another warp.
template <int columns>
struct WarpNode {
    static constexpr int tiles = columns / mma_columns;
    float4 o[tiles][32];
    float max[2][32], sum[2][32];

    __device__ float4 &accumulator(int j) { return o[j][ptx::laneid()]; }
    __device__ float &row_max(int half) { return max[half][ptx::laneid()]; }
    __device__ float &row_sum(int half) { return sum[half][ptx::laneid()]; }
};

}  // namespace tile
