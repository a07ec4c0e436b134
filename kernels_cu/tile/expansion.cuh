// Codes times scales in 16 bits, as in expanded.cuh, but in the order of the values: for products with operands of 16
// bits.
#pragma once

#include <cstdint>

#include "expanded.cuh"

namespace tile {

// Eight e2m1 codes as four bf16x2, in order. Exact: both bytes of a bf16 come from tables of the eight magnitudes.
__device__ inline void bf16x2_from_e2m1x8(uint32_t codes, uint32_t (&values)[4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const uint32_t some = half == 0 ? codes : codes >> 16, magnitudes = some & 0x7777u;
        const uint32_t signs = ptx::portable::prmt_b32(0x7f7f7f7fu, 0x7f7f7f7fu, some);         // 0 where negative
        const uint32_t lower = ptx::portable::prmt_b32(0xc0800000u, 0xc0804000u, magnitudes);   // 0 0.5 1 1.5, 2 3 4 6
        const uint32_t upper =
            ptx::portable::prmt_b32(0x3f3f3f00u, 0x40404040u, magnitudes) | (~(signs << 1) & 0x80808080u);
        values[2 * half] = __byte_perm(lower, upper, 0x5140);
        values[2 * half + 1] = __byte_perm(lower, upper, 0x7362);
    }
}

// Conversions of codes and of a scale's byte to pairs of 16 bits, and their product, which is exact.
struct ExpandedToBf16 {
    template <class Format>
    __device__ static void decode(uint32_t (&pairs)[16 / Format::bits], uint32_t word) {
        if constexpr (Format::bits == 4) {
            bf16x2_from_e2m1x8(word, pairs);
        } else {
            Expansion<Format>::decode(pairs, word);
#pragma unroll
            for (uint32_t &pair : pairs) pair = ExpandedMx::value(pair);
        }
    }
    __device__ static uint32_t scaled(uint32_t pair, uint32_t scale) { return ptx::mul_bf16x2(pair, scale); }
};
struct ExpandedMxToBf16 : ExpandedToBf16 {
    __device__ static uint32_t scale(uint32_t byte) { return ExpandedMx::scale(byte); }
};
struct ExpandedNvToBf16 : ExpandedToBf16 {   // e2m1 times ue4m3 has six significant bits
    __device__ static uint32_t scale(uint32_t byte) { return ExpandedMx::value(ExpandedNv::scale(byte)); }
};
struct ExpandedNvToF16 : ExpandedNv {
    template <class Format>
    __device__ static void decode(uint32_t (&pairs)[16 / Format::bits], uint32_t word) {
        Expansion<Format>::decode(pairs, word);
    }
};

// The order of the values of a run in pairs, for lanes that hold a run of A and of B each. Any order serves in which
// the first four of eight values are the first two pairs: these are k of one MMA. natural: (0, 1), (2, 3), (4, 5), (6,
// 7). crossed: (0, 2), (1, 3), (4, 6), (5, 7), the cheapest order for e2m1 in bf16.
enum class PairOrder { natural, crossed };

// Eight e2m1 codes as four bf16x2 in crossed order, times 2^-126. One multiplication moves the sign of a code to bit 15
// of its half and the other bits to bits 8..6. Exact.
__device__ inline void crossed_bf16x2_from_e2m1x8(uint32_t codes, uint32_t (&values)[4]) {
    const uint32_t crossed = __byte_perm(codes, 0, 0x3120);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32_t two = (i < 2 ? crossed : crossed >> 8) & (i % 2 == 0 ? 0x000f000fu : 0x00f000f0u);
        values[i] = two * (i % 2 == 0 ? 0x1040u : 0x0104u) & 0x81c081c0u;
    }
}

// The ue8m0 scales in bytes 0 and 1 as bf16x2: 2^(scale - 127), subnormal for 0, NaN for 255. Without the conversion of
// the hardware, one sum has bit 15 of a half set if the scale is 255, the other unless it is 0: both need bit 6.
__device__ inline uint32_t bf16x2_from_ue8m0x2(uint32_t bytes) {
    if constexpr (ptx::has_narrow_conversions) {
        return ptx::cvt_rn_bf16x2_ue8m0x2(bytes);
    } else {
        const uint32_t exponents = __byte_perm(bytes, 0, 0x4140) << 7;
        const uint32_t special = ((exponents + 0x00800080u) | ~(exponents + 0x7f807f80u)) & 0x80008000u;
        return exponents | special >> 9;
    }
}

// Runs of eight values for products of few rows. factors() converts the scales in bytes 0 and 1 of a word, whose others
// are 0, to a pair, eight() the codes of eight values, which begin at `first`, times a pair of equal factors. Sums of
// their products times `lift` are true sums.
struct RunsToBf16 {
    static constexpr float lift = 1.0f;

    __device__ static uint32_t factors(uint32_t bytes) { return bf16x2_from_ue8m0x2(bytes); }

    template <class Format, PairOrder order>
    __device__ static void eight(uint32_t (&pairs)[4], const uint32_t *first, uint32_t factor) {
        if constexpr (Format::bits == 4) {
            static_assert(order == PairOrder::crossed);
            crossed_bf16x2_from_e2m1x8(first[0], pairs);
#pragma unroll
            for (uint32_t &pair : pairs) pair = ptx::mul_bf16x2(ptx::mul_bf16x2(pair, 0x7e807e80u), factor);   // 2^126
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int shift = 16 * (i % 2);
                const uint32_t word = order == PairOrder::crossed ? __byte_perm(first[i / 2], 0, 0x3120) : first[i / 2];
                pairs[i] =
                    ptx::mul_bf16x2(ExpandedMx::value(ptx::cvt_rn_f16x2_e4m3x2(word >> shift & 0xffffu)), factor);
            }
        }
    }
};

// e2m1 times ue4m3 in bf16, times 2^-7: the factor holds the part of 2^126 that bf16 can hold beside a scale of 448.
struct NvRunsToBf16 {
    static constexpr float lift = 0x1p7f;

    __device__ static uint32_t factors(uint32_t bytes) {
        return ptx::mul_bf16x2(ExpandedMx::value(ptx::cvt_rn_f16x2_ue4m3x2(bytes)), 0x7b007b00u);   // 2^119
    }
    template <class Format, PairOrder order>
    __device__ static void eight(uint32_t (&pairs)[4], const uint32_t *first, uint32_t factor) {
        static_assert(Format::bits == 4 && order == PairOrder::crossed);
        crossed_bf16x2_from_e2m1x8(first[0], pairs);
#pragma unroll
        for (uint32_t &pair : pairs) pair = ptx::mul_bf16x2(pair, factor);
    }
};

struct NvRunsToF16 {
    static constexpr float lift = 1.0f;

    __device__ static uint32_t factors(uint32_t bytes) { return ptx::cvt_rn_f16x2_ue4m3x2(bytes); }

    template <class Format, PairOrder order>
    __device__ static void eight(uint32_t (&pairs)[4], const uint32_t *first, uint32_t factor) {
        static_assert(Format::bits == 4 && order == PairOrder::natural);
        ptx::portable::f16x2_from_e2m1x8(first[0], pairs);
#pragma unroll
        for (uint32_t &pair : pairs) pair = ptx::portable::mul_f16x2(pair, factor);
    }
};

// Expands chunk `chunk` of a row of codes into a row of `to`. scale_of(word) is the scale byte of a word of the chunk.
template <class Format, class To, class Tile, class ScaleOf>
__device__ inline void expand_naturally(Tile &to, int row, int chunk, const uint4 &codes, ScaleOf &&scale_of) {
    constexpr int pairs = 16 / Format::bits, chunks = 16 / Format::bits;   // of a word; in 16 bits, of a chunk of codes
    const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
    uint32_t values[4 * pairs], scale = 0;
#pragma unroll
    for (int word = 0; word < 4; ++word) {
        if (word == 0 || (word == 2 && Format::block == 16)) scale = To::scale(scale_of(word));
        uint32_t of_word[pairs];
        To::template decode<Format>(of_word, words[word]);
#pragma unroll
        for (int i = 0; i < pairs; ++i) values[word * pairs + i] = To::scaled(of_word[i], scale);
    }
#pragma unroll
    for (int i = 0; i < chunks; ++i)
        to.at(row, chunk * chunks + i) = {values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3]};
}

}   // namespace tile
