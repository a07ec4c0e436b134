// Codes times scales in 16 bits, in the order of the values: what expanded.cuh has, for operands beside others of 16
// bits.
#pragma once

#include <cstdint>

#include "expanded.cuh"

namespace tile {

// e2m1 times a ue4m3 scale in bf16: six significant bits, so exact.
struct ExpandedNvToBf16 {
    __device__ static uint32_t scale(uint32_t byte) { return ExpandedNv::scale(byte); }
    __device__ static uint32_t scaled(uint32_t f16x2, uint32_t scale) {
        return ExpandedMx::value(ExpandedNv::scaled(f16x2, scale));
    }
};

// Chunk `chunk` of a row of codes into a row of `to`; scale_of(word) gives the byte of the block of a word of the
// chunk.
template <class Format, class To, class Tile, class ScaleOf>
__device__ inline void expand_naturally(Tile &to, int row, int chunk, const uint4 &codes, ScaleOf &&scale_of) {
    constexpr int pairs = 16 / Format::bits, chunks = 16 / Format::bits;   // of a word; that become of a chunk
    const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
    uint32_t values[4 * pairs], scale = 0;
#pragma unroll
    for (int word = 0; word < 4; ++word) {
        if (word == 0 || (word == 2 && Format::block == 16)) scale = To::scale(scale_of(word));
        uint32_t of_word[pairs];
        Expansion<Format>::decode(of_word, words[word]);
#pragma unroll
        for (int i = 0; i < pairs; ++i) values[word * pairs + i] = To::scaled(of_word[i], scale);
    }
#pragma unroll
    for (int i = 0; i < chunks; ++i)
        to.at(row, chunk * chunks + i) = {values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3]};
}

}  // namespace tile
