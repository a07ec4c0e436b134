// Codes times scales in 16 bits, as in expanded.cuh, but in the order of the values: for products with operands of 16
// bits.
#pragma once

#include <cstdint>

#include "../ptx/target.cuh"
#include "expanded.cuh"

namespace tile {

// Whether MMAs take operands of a format as they are. Others are expanded first.
template <class Format>
constexpr bool needs_no_expansion = Format::bits == 16 || ptx::has_block_scaled_mma;

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
