// Operands in block formats expanded to 16 bits, codes times scales, for the MMAs that every target has.
//
// Products are exact: each value is one of bf16 (e4m3 and e2m1 times ue8m0, for scales of 2^-117 to 2^119) or of f16
// (e2m1 times ue4m3). A word of codes is what one lane of a quad contributes to a block-scaled MMA; pair i of a word
// goes to the i-th of the 16-deep MMAs that replace it. A and B share one permutation of k, which changes no sum.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "../ptx/cvt.cuh"
#include "../ptx/warp.cuh"
#include "block_tiles.cuh"
#include "format.cuh"
#include "fragment.cuh"
#include "shared.cuh"

namespace tile {

// A ue8m0 scale as a pair of bf16, and values of f16 times it.
struct ExpandedMx {
    using Element = __nv_bfloat16;
    static constexpr uint32_t one = 0x3f803f80u;

    __device__ static uint32_t scale(uint32_t byte) { return ptx::cvt_rn_bf16x2_ue8m0x2(byte * 0x101u); }
    __device__ static uint32_t value(uint32_t f16x2) {
        const float2 pair = unpack_pair(f16x2, __half{});
        return ptx::cvt_rn_bf16x2_f32(pair.y, pair.x);
    }
    __device__ static uint32_t scaled(uint32_t f16x2, uint32_t scale) { return ptx::mul_bf16x2(value(f16x2), scale); }
};

// A ue4m3 scale as a pair of f16.
struct ExpandedNv {
    using Element = __half;
    static constexpr uint32_t one = 0x3c003c00u;

    __device__ static uint32_t scale(uint32_t byte) { return ptx::cvt_rn_f16x2_ue4m3x2(byte * 0x101u); }
    __device__ static uint32_t value(uint32_t f16x2) { return f16x2; }
    __device__ static uint32_t scaled(uint32_t f16x2, uint32_t scale) { return ptx::portable::mul_f16x2(f16x2, scale); }
};

// How a format is expanded. fragments: the number of 16-deep MMAs that replace one block-scaled MMA, and of pairs of a
// word of codes.
template <class Format>
struct Expansion : std::conditional_t<Format::block == 16, ExpandedNv, ExpandedMx> {
    static constexpr int fragments = Format::depth / 16;

    // The pairs of a word of codes in f16.
    __device__ static void decode(uint32_t (&pairs)[fragments], uint32_t word) {
        if constexpr (Format::bits == 4) {
            ptx::portable::f16x2_from_e2m1x8(word, pairs);
        } else {
            pairs[0] = ptx::cvt_rn_f16x2_e4m3x2(word & 0xffffu);
            pairs[1] = ptx::cvt_rn_f16x2_e4m3x2(word >> 16);
        }
    }
};

// The index of the scale of word `word` of chunk `chunk` of a row's codes.
template <class Format>
__host__ __device__ constexpr int block_of(int chunk, int word) {
    return (4 * chunk + word) * (32 / Format::bits) / Format::block;
}

// A of one block-scaled MMA as `fragments` A of 16-deep MMAs. `byte` and `thread` select its scales, as in ptx/mma.cuh;
// if not `scaled`, they are all 1. Called by all 32 lanes.
template <class Format, int byte, int thread, bool scaled = true>
__device__ inline void expand_a(FragmentA (&a)[Expansion<Format>::fragments], const FragmentA &codes, uint32_t scales) {
    using To = Expansion<Format>;
    uint32_t words[2] = {};
    if constexpr (scaled) {
#pragma unroll
        for (int row = 0; row < 2; ++row)
            words[row] = ptx::shfl_sync_idx_b32(scales, (ptx::laneid() & ~3) + 2 * thread + row);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {   // row g + 8 (i & 1), word t of chunk i >> 1
        uint32_t pairs[To::fragments];
        To::decode(pairs, codes[i]);
        const int at =
            byte + (Format::block == 16 ? block_of<Format>(i / 2, ptx::laneid() % 4) : block_of<Format>(i / 2, 0));
        const uint32_t scale = scaled ? To::scale(words[i % 2] >> (8 * at) & 0xffu) : To::one;
#pragma unroll
        for (int fragment = 0; fragment < To::fragments; ++fragment)
            a[fragment][i] = scaled ? To::scaled(pairs[fragment], scale) : To::value(pairs[fragment]);
    }
}

// Expands chunk `chunk` of a row of codes into a row of `to`, a tile for load_b. scale_of(block) is the scale byte of a
// block of the row.
template <class Format, class Tile, class ScaleOf>
__device__ inline void expand_chunk(Tile &to, int row, int chunk, const uint4 &codes, ScaleOf &&scale_of) {
    using To = Expansion<Format>;
    const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
    uint32_t pairs[4][To::fragments], scale = 0;
#pragma unroll
    for (int word = 0; word < 4; ++word) {
        if (word == 0 || (word == 2 && Format::block == 16)) scale = To::scale(scale_of(block_of<Format>(chunk, word)));
        To::decode(pairs[word], words[word]);
#pragma unroll
        for (uint32_t &pair : pairs[word]) pair = To::scaled(pair, scale);
    }
#pragma unroll
    for (int i = 0; i < To::fragments; ++i)
        to.at(row, 2 * (chunk / 2 * To::fragments + i) + chunk % 2) = {pairs[0][i], pairs[1][i], pairs[2][i],
                                                                       pairs[3][i]};
}

// Calls body(row, chunk) for all chunks of `rows` rows. Neighboring lanes have neighboring rows: with the tiles'
// swizzles neither reads nor writes have bank conflicts.
template <int threads, int rows, int row_chunks, class Body>
__device__ inline void share_chunks(Body &&body) {
    constexpr int chunks = rows * row_chunks;
#pragma unroll
    for (int first = 0; first < chunks; first += threads) {
        const int item = first + threadIdx.x;
        if (chunks % threads == 0 || item < chunks) body(item % rows, item / rows);
    }
}

// Expands a tile of keys, with rows in the order of the columns of S, by `threads` threads.
template <class Order, int threads, class Tile>
__device__ inline void expand_keys(SharedTile<Tile::keys, 2 * Tile::dim> &to, const Tile &from) {
    share_chunks<threads, Tile::keys, Tile::row_chunks>([&](int row, int chunk) {
        const int key = Order::key(row / 8, row % 8);
        expand_chunk<typename Tile::Format>(to, row, chunk, from.chunks[Tile::index(key, chunk)], [&](int block) {
            return reinterpret_cast<const uint8_t *>(from.scales[key])[block];
        });
    });
}

// Expands a tile of values, by `threads` threads.
template <int threads, class Tile>
__device__ inline void expand_values(SharedTile<Tile::dim_v, 2 * Tile::keys> &to, const Tile &from) {
    share_chunks<threads, Tile::dim_v, Tile::row_bytes / 16>([&](int row, int chunk) {
        expand_chunk<typename Tile::Format>(
            to, row, chunk, from.codes.chunks[from.codes.index(row, chunk)],
            [&](int block) { return reinterpret_cast<const uint8_t *>(from.scales)[Tile::place(row, block)]; });
    });
}

}   // namespace tile
