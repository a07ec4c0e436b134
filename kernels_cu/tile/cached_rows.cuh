// Keys and values in the formats of caches and operands. Shared memory holds units of 16 keys: their codes and scales,
// unchanged. Lanes read the codes of their fragments of B and multiply them by their scales, exactly. So caches of the
// same values in different formats give the same sums, bit for bit.
//
// A unit is 16 rows of one token each, with scales along the row. Values of an operand in a block format are in tiles
// of 64 keys, whose rows are columns of V with scales along the keys: there a unit is a quarter of the columns, which a
// warp expands to a SharedTile.
//
// Keys as B: column g is key g, and lane (g, t) = (lane / 4, lane % 4) has the t-th quarter of its row. The values 8 i
// .. 8 i + 7 of that quarter are the k of MMAs 2 i and 2 i + 1, as pairs (0, 4), (1, 5) and (2, 6), (3, 7). A holds Q
// in the same order. Values as B: lane (g, t) has the g-th eighth of the rows of keys 2 t, 2 t + 1, 2 t + 8 and 2 t +
// 9, and value i of it belongs to column tile i. Values in 16 bits are loaded by ldmatrix, and their column tiles are
// those of V.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "../kernel.cuh"
#include "../ptx/access.cuh"
#include "../ptx/alu.cuh"
#include "../ptx/barrier.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/cp_async_all.cuh"
#include "../ptx/cp_async_once.cuh"
#include "../ptx/cvt.cuh"
#include "../ptx/target.cuh"
#include "../ptx/warp.cuh"
#include "block_tiles.cuh"
#include "format.cuh"
#include "fragment.cuh"
#include "shared.cuh"

namespace tile {

constexpr int cached_rows = 16;   // keys of a unit

// The blocks of four warps of attention of few queries that fit a multiprocessor with heads of up to 128: two, or four
// of the short code for known keys of less than 16 bits on a Hopper.
template <bool narrow>
constexpr int few_blocks = narrow && ptx::shared_bytes_per_block > 128 * 1024 ? 4 : 2;

// Bytes of shared memory of each of these warps. Larger rings, where they fit, hide the memory latency of a Hopper.
// has_halves: whether Q is there in two types.
template <int dim, int blocks, bool has_halves>
constexpr int few_arena_bytes = dim > 128                                   ? 23040
                                : ptx::shared_bytes_per_block <= 128 * 1024 ? 11520
                                : blocks == 4                               ? (has_halves ? 13312 : 13824)
                                                                            : 26880;

// The formats of rows, as numbered by scalars of entries: values in 16 bits, or codes with scales.
enum class RowFormat { plain, mxfp8, mxfp4, nvfp4 };

__device__ inline int bits_of(RowFormat format) {
    return format == RowFormat::plain ? 16 : format == RowFormat::mxfp8 ? 8 : 4;
}
// The number of blocks of `values` values, rounded up.
__device__ inline int blocks_of(RowFormat format, int values) {
    return format == RowFormat::nvfp4 ? (values + 15) >> 4 : (values + 31) >> 5;
}

// The factor from expanded values to true values.
__device__ inline float lift_of(RowFormat format) { return format == RowFormat::nvfp4 ? 0x1p7f : 1.0f; }

__device__ inline uint32_t multiply_pair(uint32_t a, uint32_t b, __nv_bfloat16) { return ptx::mul_bf16x2(a, b); }
__device__ inline uint32_t multiply_pair(uint32_t a, uint32_t b, __half) { return ptx::portable::mul_f16x2(a, b); }

// A word of eight e2m1 codes as pairs of Element, in order, times pairs of equal factors. The bits of a code are moved
// to those of a 16-bit float: sign to sign, the other three from the second-lowest bit of the exponent on.
template <class Element, class... Factors>
__device__ inline uint4 e2m1_times(uint32_t word, Factors... factors) {
    constexpr int mantissa = is_bf16<Element> ? 7 : 10;
    constexpr uint32_t magnitude = 0x00070007u << (mantissa - 1), sign = 0x80008000u;
    uint32_t pairs[4];   // nibble j of both halves of the word
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const int up = mantissa - 1 - 4 * j;
        const uint32_t moved = up >= 0 ? word << (up > 0 ? up : 0) : word >> (up < 0 ? -up : 0);
        pairs[j] = (moved & magnitude) | ((word << (12 - 4 * j)) & sign);
        ((pairs[j] = multiply_pair(pairs[j], factors, Element{})), ...);
    }
    return {__byte_perm(pairs[0], pairs[1], 0x5410), __byte_perm(pairs[2], pairs[3], 0x5410),
            __byte_perm(pairs[0], pairs[1], 0x7632), __byte_perm(pairs[2], pairs[3], 0x7632)};
}

// The same with pairs of codes j and j + 4, times a pair of factors, one pair at a time.
template <class Element, class... Factors>
__device__ inline void e2m1_pairs(uint32_t word, uint32_t (&pairs)[4], Factors... factors) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        if constexpr (is_bf16<Element>) {   // one multiplication moves the sign to bit 15 and the others to bits 8..6
            const uint32_t codes = (j < 2 ? word : word >> 8) & (j % 2 == 0 ? 0x000f000fu : 0x00f000f0u);
            pairs[j] = codes * (j % 2 == 0 ? 0x1040u : 0x0104u) & 0x81c081c0u;
        } else {
            const uint32_t moved = j < 3 ? word << (9 - 4 * j) : word >> 3;
            pairs[j] = (moved & 0x0e000e00u) | ((word << (12 - 4 * j)) & 0x80008000u);
        }
        ((pairs[j] = multiply_pair(pairs[j], factors, Element{})), ...);
    }
}

// Rows in 16 bits.
struct CachedPlain {
    static constexpr int bits = 16, block = 1 << 16;   // without scales
};

// The block formats. block: values per scale; chunk_values: values in 16 bytes of codes. scales() converts two scales,
// in a word, the low byte first, or each in one of its own, to a pair of factors. pairs() expands a word of codes: pair
// j is code j of its low half and code j of its high half. expand() expands eight number `eight` of a chunk of codes,
// in order.

// e2m1 times ue4m3, times 2^-7: exact in f16 and bf16.
template <class Element>
struct CachedNvfp4 {
    static constexpr int bits = 4, block = 16, chunk_values = 32;

    __device__ static uint32_t scales(uint32_t bytes) {
        const uint32_t pair = ptx::cvt_rn_f16x2_ue4m3x2(bytes);
        if constexpr (is_bf16<Element>) {   // bf16 pairs of e2m1 codes are 2^-126 times the values
            const float2 values = unpack_pair(pair, __half{});
            constexpr uint32_t lift = 0x7b007b00u;   // 2^119
            return ptx::mul_bf16x2(ptx::cvt_rn_bf16x2_f32(values.y, values.x), lift);
        } else {   // 2^-14
            return multiply_pair(pair, 0x58005800u, __half{});
        }
    }
    __device__ static uint32_t scales(uint32_t low, uint32_t high) { return scales(low | high << 8); }
    __device__ static void pairs(uint32_t word, uint32_t scale, uint32_t (&pairs)[4]) {
        e2m1_pairs<Element>(word, pairs, scale);
    }
    __device__ static uint4 expand(const uint32_t (&words)[4], int eight, uint32_t scale) {
        return e2m1_times<Element>(words[eight], scale);
    }
};

// The ue8m0 scales of bytes 0 and 1 as bf16x2, exact, with fewer instructions than the stand-in for the conversion: a
// maximum makes 2^-127 of 0, and infinity, which stands for 255, times 0 is NaN.
constexpr bool lifts_ue8m0 = ptx::has_packed_integers && !ptx::has_narrow_conversions;
__device__ inline uint32_t bf16x2_from_exponents(uint32_t exponents) {   // those of bf16, a pair
    const uint32_t powers = ptx::max_s16x2(exponents, 0x00400040u);
    return ptx::fma_rn_bf16x2(powers, 0, powers);
}
__device__ inline uint32_t bf16x2_from_ue8m0x2(uint32_t bytes) {
    if constexpr (lifts_ue8m0) return bf16x2_from_exponents(__byte_perm(bytes, 0, 0x4140) << 7);
    else return ptx::cvt_rn_bf16x2_ue8m0x2(bytes);
}
// Two bytes, each in its half of a word, times 2^shift.
__device__ inline uint32_t in_halves(uint32_t low, uint32_t high, int shift) {
    return low * (1u << shift) + high * (0x10000u << shift);
}
__device__ inline uint32_t bf16x2_from_ue8m0x2(uint32_t low, uint32_t high) {
    if constexpr (lifts_ue8m0) return bf16x2_from_exponents(in_halves(low, high, 7));
    else return ptx::cvt_rn_bf16x2_ue8m0x2(low | high << 8);
}

// e2m1 times ue8m0, in bf16: exact for scales from 2^-117 to 2^119.
struct CachedMxfp4 {
    static constexpr int bits = 4, block = 32, chunk_values = 32;
    static constexpr uint32_t lift = 0x7e807e80u;   // 2^126

    __device__ static uint32_t scales(uint32_t bytes) { return bf16x2_from_ue8m0x2(bytes); }
    __device__ static uint32_t scales(uint32_t low, uint32_t high) { return bf16x2_from_ue8m0x2(low, high); }
    __device__ static void pairs(uint32_t word, uint32_t scale, uint32_t (&pairs)[4]) {
        e2m1_pairs<__nv_bfloat16>(word, pairs, lift, scale);
    }
    __device__ static uint4 expand(const uint32_t (&words)[4], int eight, uint32_t scale) {
        return e2m1_times<__nv_bfloat16>(words[eight], lift, scale);
    }
};

// The same for scales up to 2: scale and lift are one factor.
struct CachedMxfp4Small : CachedMxfp4 {
    __device__ static uint32_t scales(uint32_t bytes) {   // 2^(byte - 1)
        return (__byte_perm(bytes, 0, 0x4140) << 7) + 0x3f003f00u;
    }
    __device__ static uint32_t scales(uint32_t low, uint32_t high) { return in_halves(low, high, 7) + 0x3f003f00u; }
    __device__ static void pairs(uint32_t word, uint32_t scale, uint32_t (&pairs)[4]) {
        e2m1_pairs<__nv_bfloat16>(word, pairs, scale);
    }
    // Whether no byte of a word of scales is above that of 2.
    __device__ static bool holds(uint32_t bytes) {
        return (((bytes & 0x7f7f7f7fu) + 0x7f7f7f7fu) & bytes & 0x80808080u) == 0;
    }
};

// e4m3 times ue8m0, in bf16, likewise.
struct CachedMxfp8 {
    static constexpr int bits = 8, block = 32, chunk_values = 16;

    __device__ static uint32_t scales(uint32_t bytes) { return bf16x2_from_ue8m0x2(bytes); }
    __device__ static uint32_t scales(uint32_t low, uint32_t high) { return bf16x2_from_ue8m0x2(low, high); }
    __device__ static void pairs(uint32_t word, uint32_t scale, uint32_t (&pairs)[2]) {
        uint32_t halves[2];
        ptx::cvt_rn_f16x2_e4m3x4(halves, word);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float2 values = unpack_pair(halves[i], __half{});
            pairs[i] = ptx::mul_bf16x2(ptx::cvt_rn_bf16x2_f32(values.y, values.x), scale);
        }
    }
    __device__ static uint4 expand(const uint32_t (&words)[4], int eight, uint32_t scale) {
        uint32_t first[2], second[2];
        pairs(words[2 * eight], scale, first);
        pairs(words[2 * eight + 1], scale, second);
        return {first[0], first[1], second[0], second[1]};
    }
};

// The same in f16, times 2^8, for MMAs with f16 queries: exact for scales from 2^-13 to 2^-1, by which all values but 0
// become normal numbers. From e4m3 to f16 takes one instruction where bf16 takes four.
struct CachedMxfp8Half : CachedMxfp8 {
    static constexpr float lift = 0x1p8f;

    __device__ static uint32_t scales(uint32_t bytes) {   // 2^(byte - 119)
        return (__byte_perm(bytes, 0, 0x4140) - 0x00680068u) << 10;
    }
    __device__ static uint32_t scales(uint32_t low, uint32_t high) {
        return in_halves(low, high, 10) - (0x00680068u << 10);
    }
    __device__ static void pairs(uint32_t word, uint32_t scale, uint32_t (&pairs)[2]) {
        ptx::cvt_rn_f16x2_e4m3x4(pairs, word);
#pragma unroll
        for (int i = 0; i < 2; ++i) pairs[i] = multiply_pair(pairs[i], scale, __half{});
    }
    // Whether all bytes of a word of scales are from 114 to 126.
    __device__ static bool holds(uint32_t bytes) {
        const uint32_t at_least = bytes + 0x0e0e0e0eu, nan = bytes + 0x01010101u;   // bits 7; right if bytes have none
        return (at_least & ~nan & ~bytes & 0x80808080u) == 0x80808080u;
    }
};
template <class Format>
constexpr bool is_half = false;
template <>
constexpr bool is_half<CachedMxfp8Half> = true;

// Calls body(Format{}) with the type of a block format whose values Element holds.
template <class Element, class Body>
__device__ inline void with_block_format(RowFormat format, Body &&body) {
    if constexpr (is_bf16<Element>) {
        if (format == RowFormat::mxfp8) return body(CachedMxfp8{});
        if (format == RowFormat::mxfp4) return body(CachedMxfp4{});
    }
    body(CachedNvfp4<Element>{});
}
template <class Element, class Body>
__device__ inline void with_format(RowFormat format, Body &&body) {
    if (format == RowFormat::plain) return body(CachedPlain{});
    with_block_format<Element>(format, body);
}

// Eight values of a row as the pairs (j, j + 4), from words of codes or of 16 bits from `first` on.
template <class Format>
__device__ inline void pairs_of_row(const uint32_t *first, uint32_t scale, uint32_t (&pairs)[4]) {
    if constexpr (Format::bits == 16) {
#pragma unroll
        for (int j = 0; j < 4; ++j) pairs[j] = __byte_perm(first[j / 2], first[j / 2 + 2], j % 2 ? 0x7632 : 0x5410);
    } else if constexpr (Format::bits == 8) {
        uint32_t some[2], others[2];
        Format::pairs(__byte_perm(first[0], first[1], 0x5140), scale, some);
        Format::pairs(__byte_perm(first[0], first[1], 0x7362), scale, others);
        pairs[0] = some[0], pairs[1] = some[1], pairs[2] = others[0], pairs[3] = others[1];
    } else {
        Format::pairs(*first, scale, pairs);
    }
}

// Eight codes of two rows as the pairs (code j of `low`, code j of `high`).
template <class Format>
__device__ inline void pairs_of_rows(const uint32_t *low, const uint32_t *high, uint32_t scales, uint32_t (&pairs)[8]) {
    constexpr int of_word = Format::bits == 8 ? 2 : 4;
#pragma unroll
    for (int i = 0; i < 8 / of_word; ++i) {
        uint32_t some[of_word];
        const uint32_t a = low[Format::bits == 8 ? i / 2 : 0], b = high[Format::bits == 8 ? i / 2 : 0];
        const int selectors = Format::bits == 8 ? (i % 2 ? 0x7362 : 0x5140) : i % 2 ? 0x7632 : 0x5410;
        Format::pairs(__byte_perm(a, b, selectors), scales, some);
#pragma unroll
        for (int j = 0; j < of_word; ++j) pairs[of_word * i + j] = some[j];
    }
}

// The layout of V's scales in a tile of block_tiles.cuh: groups of 32 words, each for `of_word` groups of 32 columns.
struct ValueScales {
    int steps, shift;   // MMAs along the depth; a group serves 2^shift columns

    __device__ explicit ValueScales(RowFormat format)
        : steps(format == RowFormat::mxfp8 ? 2 : 1), shift(format == RowFormat::nvfp4   ? 5
                                                           : format == RowFormat::mxfp4 ? 6
                                                                                        : 7) {}
    __device__ int group(int column) const { return column >> shift; }
    // How many groups serve `columns` columns, from group(the first) on.
    __device__ int groups(int columns) const { return (columns + (1 << shift) - 1) >> shift; }
};

// The layout of a tile of block_tiles.cuh whose rows are tokens: KeyTile, or SharedTile of values in 16 bits. What the
// row adds to the number of a chunk, and the place of the row, are parts of its number, cut out by shifts and masks.
struct TileRows {
    int chunks;
    unsigned near_shift, far_shift, far_bits, swizzled, exchanged;

    __device__ TileRows(int row_bytes, bool keys) : chunks(row_bytes / 16) {
        const int power = chunks % 8 == 0 ? 3 : chunks % 4 == 0 ? 2 : chunks % 2 == 0 || keys ? 1 : 0;
        near_shift = 3 - power;
        swizzled = (1 << power) - 1;
        far_shift = 5 - power;   // of key tiles: bits 3 and 4, or bit 4 alone
        far_bits = !keys ? 0 : power == 3 ? 6 : power == 2 ? 3 : 1;
        exchanged = keys && power == 1 ? 2 : 0;
    }
    __device__ int index(unsigned row, unsigned chunk) const {
        const unsigned place = row ^ (row >> 2 & exchanged);
        return place * chunks + (chunk ^ ((row >> near_shift ^ (row >> far_shift & far_bits)) & swizzled));
    }
};

// Units of heads of `dim` values, padded with zeros.
template <class Element_, int dim_>
struct CachedUnits {
    using Element = Element_;
    static constexpr int dim = dim_, quarter = dim / 4;
    static_assert(dim % 64 == 0, "a quarter of the columns is two tiles of MMAs");
    using Rows = SharedTile<cached_rows, 2 * dim>;        // in 16 bits: a row is a token
    using Columns = SharedTile<quarter, 2 * tile_keys>;   // a row is a column of V

    // Chunks of codes of a unit, and of a token's row; bytes from a token's scales to the next token's.
    __device__ static int chunks(RowFormat format) { return dim * bits_of(format) / 8; }
    __device__ static int row_chunks(RowFormat format) { return dim * bits_of(format) / 128; }
    __device__ static int scale_step(RowFormat format) { return max(blocks_of(format, dim), 4); }
    __device__ static int blocks(RowFormat format) { return blocks_of(format, dim); }

    // Calls body(Format{}) for units of rows as with_format does, or with a quicker format that holds them: for keys of
    // `k_batch` units of CachedMxfp8, if there are f16 queries, and for `batch` units of CachedMxfp4.
    template <int batch, int k_batch, class Body>
    __device__ static void with_format_of(RowFormat format, const char *slot, bool halves, Body &&body) {
        if constexpr (is_bf16<Element> && dim == 128) {   // four bytes of scales to a row
            if (format == RowFormat::mxfp4 && holds_all<CachedMxfp4Small, batch>(slot)) return body(CachedMxfp4Small{});
            if constexpr (k_batch > 0)
                if (halves && holds_all<CachedMxfp8Half, k_batch>(slot)) return body(CachedMxfp8Half{});
        }
        with_format<Element>(format, body);
    }
    // Whether a format holds the scales of `batch` units, with a word of them to a row.
    template <class Format, int batch>
    __device__ static bool holds_all(const char *slot) {
        bool holds = true;
#pragma unroll
        for (int i = 0; i < batch; i += 2) {
            const unsigned lane = ptx::laneid(), unit = i + lane / cached_rows, row = lane % cached_rows;
            const char *codes = slot + unit * row_bytes<Format>();
            if (i + 1 < batch || unit < batch)
                holds &= Format::holds(
                    reinterpret_cast<const uint32_t *>(codes + cached_rows * dim * Format::bits / 8)[row]);
        }
        return !ptx::vote_sync_any(!holds);
    }

    // Words of scales from a token to the next one.
    template <class Format>
    static constexpr int scale_words = dim / Format::block > 4 ? dim / Format::block / 4 : 1;

    // Bytes of a unit of rows in shared memory, a multiple of what swizzles need.
    template <class Format>
    __host__ __device__ static constexpr int row_bytes() {
        if constexpr (Format::bits == 16) return sizeof(Rows);
        else return ceil_div(cached_rows * (dim * Format::bits / 8 + 4 * scale_words<Format>), 128) * 128;
    }
    __device__ static int bytes(RowFormat format) {
        int bytes;
        with_format<Element>(format, [&](auto of) { bytes = row_bytes<decltype(of)>(); });
        return bytes;
    }
    // The same for a unit of columns of a block format.
    __device__ static int column_bytes(RowFormat format) {
        const ValueScales scales(format);
        return ceil_div(16 * chunks(format) + 128 * scales.steps * scales.groups(quarter), 128) * 128;
    }

    // Whether rows of Format have two scales. If they follow one another in memory, they are `packed`: the word of each
    // row in shared memory then holds those of an even row and the odd row behind it.
    template <class Format>
    static constexpr bool packable = Format::bits < 16 && dim / Format::block == 2;
    __device__ static bool packable_rows(RowFormat format) {
        return format != RowFormat::plain && dim >> (format == RowFormat::nvfp4 ? 4 : 5) == 2;
    }

    // The place of a token's chunk of codes in a unit, in chunks. Units are swizzled as a SharedTile, keys twice, so
    // that neither reading fragments nor copying rows has bank conflicts.
    __device__ static int place(int row_chunks, bool keys, unsigned row, unsigned chunk) {
        const int mask = min(row_chunks, 8) - 1, shift = row_chunks >= 8 ? 0 : row_chunks == 4 ? 1 : 2;
        return row * row_chunks + (chunk ^ (keys ? (chunk >> 3) * 2 : 0) ^ (row >> shift & mask));
    }

    // The place of a chunk of row `row`, moved as the same chunk of row + rows * round is, up to whole rows. What this
    // adds to the row has no bit that is set in row >> shift.
    template <int row_chunks, int rows>
    __device__ static uint32_t moved(uint32_t target, int round) {
        constexpr int mask = (row_chunks < 8 ? row_chunks : 8) - 1, shift = row_chunks >= 8   ? 0
                                                                            : row_chunks == 4 ? 1
                                                                                              : 2;
        return target ^ 16 * (rows * round >> shift & mask);
    }

    // Starts copying codes of 16 tokens. source(row, chunk) is the address of a chunk, null for zeros.
    template <class Source>
    __device__ static void copy_rows(uint32_t unit, RowFormat format, bool keys, Source &&source) {
        const int log = 31 - __clz(row_chunks(format)), count = cached_rows << log;
#pragma unroll 1
        for (int i = ptx::laneid(); i < count; i += 32) {
            const int row = i >> log, chunk = i & ((1 << log) - 1);
            const char *from = source(row, chunk);
            ptx::cp_async_cg_16_once(unit + 16 * place(1 << log, keys, row, chunk), from, from != nullptr);
        }
    }

    // Rows of codes or of scales of whole units: the bytes from one to the next, and how many chunks or bytes they
    // have.
    struct WholeRows {
        unsigned stride;
        int present;
    };

    // Starts copying `batch` units of tokens with their scales, in whole rounds of a warp; an equal part of its lanes
    // copies each unit. codes_of(i) and scales_of(i) are the addresses of row 0 of unit i; those of scales are 4-byte
    // aligned. Tokens other than begin .. end - 1 become zeros; there are none if scales are packed.
    template <class Format, int batch, class CodesOf, class ScalesOf>
    __device__ static void copy_whole(uint32_t slot, bool keys, int begin, int end, const WholeRows &codes,
                                      const WholeRows &scales, bool packed, CodesOf &&codes_of, ScalesOf &&scales_of) {
        constexpr int lanes = 32 / batch, row_chunks = dim * Format::bits / 128,
                      rows = lanes / row_chunks;   // of a round
        static_assert(rows > 0, "a part of the lanes copies a whole row");
        // No part of the addresses may occupy registers from one batch to the next.
        const unsigned all = ptx::of_this_branch(ptx::laneid()), unit = all / lanes, lane = all % lanes,
                       row = lane / row_chunks;
        const int chunk = lane % row_chunks;
        const uint32_t target_unit = slot + unit * row_bytes<Format>();   // 128-byte aligned
        const uint32_t target = target_unit + 16 * place(row_chunks, keys, row, chunk);
        const unsigned long long step = rows * static_cast<unsigned long long>(codes.stride);
        const char *from = codes_of(unit) + (row * static_cast<unsigned long long>(codes.stride) + 16 * chunk);
        const auto target_of = [&](int round) { return moved<row_chunks, rows>(target, round) + 16 * lanes * round; };
        // Scales are copied in words: this lane's word of a row, and its addresses.
        constexpr int of_row = scale_words<Format>, scale_rounds = ceil_div(cached_rows * of_row, lanes),
                      scale_rows = lanes / of_row;   // of a round
        const unsigned scale_row = lane / of_row, word = lane % of_row;
        const bool pairs = packable<Format> && packed,
                   has_word = cached_rows * of_row % lanes == 0 || lane < cached_rows * of_row;
        const unsigned long long scale_step = scale_rows * static_cast<unsigned long long>(scales.stride);
        const uint32_t scale_target = target_unit + cached_rows * dim * Format::bits / 8 + 4 * lane;
        const auto scales_from = [&] {
            return scales_of(unit) +
                   ((pairs ? scale_row & ~1u : scale_row) * static_cast<unsigned long long>(scales.stride) + 4 * word);
        };
        if (begin <= 0 && end >= batch * cached_rows && codes.present == row_chunks &&
            (Format::bits == 16 || pairs || scales.present >= 4 * of_row)) {   // nothing is missing
#pragma unroll
            for (int round = 0; round < cached_rows / rows; ++round, from += step)
                ptx::cp_async_cg_16_once(target_of(round), from);
            if constexpr (Format::bits < 16) {
                from = scales_from();
#pragma unroll
                for (int round = 0; round < scale_rounds; ++round, from += scale_step)
                    if (has_word) ptx::cp_async_ca_4_all(scale_target + 4 * lanes * round, from);
            }
            return;
        }
        // Rows from the first one of this lane that is copied, and how many rows behind that are.
        const unsigned first = cached_rows * unit, from_begin = first + row - begin,
                       shown = chunk < codes.present ? end - begin : 0;
#pragma unroll 1
        for (int round = 0; round < cached_rows / rows; ++round, from += step)
            ptx::cp_async_cg_16_if(from_begin + rows * round < shown, target_of(round), from);
        if constexpr (Format::bits < 16) {
            from = scales_from();
#pragma unroll 1
            for (int round = 0; round < scale_rounds; ++round, from += scale_step) {
                const int at = first + scale_row + scale_rows * round;
                if (has_word)
                    ptx::cp_async_ca<4>(scale_target + 4 * lanes * round, from,
                                        pairs                     ? 4
                                        : at >= begin && at < end ? max(min(scales.present - 4 * int(word), 4), 0)
                                                                  : 0);
            }
        }
    }

    // Where a lane of copy_runs() writes its first codes in a slot.
    template <class Format, int batch>
    __device__ static unsigned place_of_run(bool keys) {
        constexpr int lanes = 32 / batch, row_chunks = dim * Format::bits / 128;
        const unsigned all = ptx::laneid(), lane = all % lanes;
        return all / lanes * row_bytes<Format>() +
               16 * place(row_chunks, row_chunks > 8 && keys, lane / row_chunks, lane % row_chunks);
    }
    // The same as copy_whole() where nothing is missing and the rows of a unit follow one another, those of codes and
    // those of scales. codes and scales are the addresses of row 0 of this lane's unit, multiples of 16; all others are
    // constant offsets from them. first: place_of_run().
    template <class Format, int batch>
    __device__ static void copy_runs(uint32_t slot, unsigned first, const char *codes, const char *scales) {
        constexpr int lanes = 32 / batch, row_chunks = dim * Format::bits / 128, rows = lanes / row_chunks;
        static_assert(rows > 0 && row_chunks <= 16, "a part of the lanes copies a whole row");
        const unsigned all = ptx::laneid(), unit = all / lanes, lane = all % lanes;
        const uint32_t target = slot + first;
        codes += 16 * lane;
#pragma unroll
        for (int round = 0; round < cached_rows / rows; ++round)
            ptx::cp_async_cg_16_once(moved<row_chunks, rows>(target, round) + 16 * lanes * round,
                                     codes + 16 * lanes * round);
        if constexpr (Format::bits < 16) {
            const uint32_t target_scales = slot + unit * row_bytes<Format>() + cached_rows * dim * Format::bits / 8;
            if constexpr (packable<Format>) {   // each word is there for both of its rows
                constexpr int rounds = ceil_div(cached_rows, lanes);
                scales += 4 * (lane / 2);
#pragma unroll
                for (int round = 0; round < rounds; ++round)
                    if (lanes <= cached_rows || lane < cached_rows)
                        ptx::cp_async_ca_all<4>(target_scales + 4 * (lane + lanes * round), scales + 2 * lanes * round);
            } else {
                constexpr int run = 4 * cached_rows * scale_words<Format>, of_lane = run / lanes,
                              bytes = of_lane < 4 ? 4 : of_lane;   // of a copy
                static_assert(bytes <= 16, "a copy for each lane");
                scales += bytes * lane;
                if (of_lane >= 4 || lane < run / bytes) {
                    if constexpr (bytes == 16) ptx::cp_async_cg_16_once(target_scales + bytes * lane, scales);
                    else ptx::cp_async_ca_all<bytes>(target_scales + bytes * lane, scales);
                }
            }
        }
    }

    // Starts copying the scales of 16 tokens, `present` bytes each. source(row) is their address, null for zeros. If
    // not `aligned` to 4 bytes, they are copied before this returns.
    template <class Source>
    __device__ static void copy_scales(char *unit, RowFormat format, int present, bool aligned, bool packed,
                                       Source &&source) {
        const int step = scale_step(format), log = 31 - __clz(step);   // a power of two
        char *scales = unit + 16 * chunks(format);
        const uint32_t target = static_cast<uint32_t>(__cvta_generic_to_shared(scales));
        if (aligned) {
#pragma unroll 1
            for (int i = ptx::laneid(); i < cached_rows << (log - 2); i += 32) {
                const int row = i >> (log - 2), word = i & ((step >> 2) - 1);
                const char *from = source(row);
                ptx::cp_async_ca<4>(target + 4 * i, from + (from ? 4 * word : 0),
                                    from ? max(min(present - 4 * word, 4), 0) : 0);
            }
        } else {
#pragma unroll 1
            for (int i = ptx::laneid(); i < cached_rows * step; i += 32) {
                const int row = i >> log, byte = i & (step - 1);
                const char *from = source(row);
                if (packed && byte >= 2) continue;   // the places of the other row of a pair
                scales[packed ? i + 2 * (row & 1) : i] = from && byte < present ? from[byte] : 0;
            }
        }
    }

    // Starts copying quarter `part` of the tile_dim columns of a tile of V, with their scales.
    __device__ static void copy_columns(uint32_t unit, RowFormat format, const char *tile, int part, int tile_dim) {
        const int count = chunks(format), row_chunks = tile_keys * bits_of(format) / 128, first = part * count;
#pragma unroll 2
        for (int i = ptx::laneid(); i < count; i += 32)
            ptx::cp_async_cg_16_once(unit + 16 * i, tile + 16 * (first + i), first + i < tile_dim * row_chunks);
        const ValueScales scales(format);
        const int groups = scales.groups(quarter), there = scales.groups(tile_dim), i = ptx::laneid();   // one or two
        if (i < 8 * scales.steps * groups) {
            const int step = groups == 2 ? i / 16 : i / 8,
                      group = scales.group(part * quarter) + (groups == 2 ? i / 8 % 2 : 0);
            ptx::cp_async_cg_16(unit + 16 * (count + i),
                                tile + 16 * (tile_dim * row_chunks + 8 * (step * there + group) + i % 8),
                                group < there);
        }
    }

    // Where a lane finds its part of a row of each unit in a block format, in bytes from the unit on: scales, and codes
    // if they are in one chunk.
    struct Places {
        unsigned scales, codes;
    };
    // Those of keys: a quarter of row g; and of values: an eighth of row 2 t.
    template <class Format>
    __device__ static Places key_places(bool packed) {
        const unsigned lane = ptx::laneid();
        return places<Format, dim / 4>(true, lane / 4, lane % 4, packed);
    }
    template <class Format>
    __device__ static Places value_places(bool packed) {
        const unsigned lane = ptx::laneid();
        return places<Format, dim / 8>(false, lane % 4 * 2, lane / 4, packed);
    }

    // sum[j] += Q K^T of keys 8 (group + j) .. 8 (group + j) + 7 of consecutive units: q(step) is A of an MMA, which
    // all groups use before the next.
    template <int groups, class Format, class Query>
    __device__ static void multiply_keys(Accumulator (&sum)[groups], const char *units, int group, bool packed,
                                         Query &&q, Format of) {
        for_keys<groups, 1>(
            units, group, key_places<Format>(packed),
            [&](int step, int j, const uint32_t (&pairs)[1][4]) {
                multiply(sum[j], q(step), FragmentB{pairs[0][0], pairs[0][1]}, Multiplied<Format>{});
                multiply(sum[j], q(step + 1), FragmentB{pairs[0][2], pairs[0][3]}, Multiplied<Format>{});
            },
            of);
    }

    // sum[i] += K Q^T of unit i, the same products for eight queries: keys are A, and q(step) is B of an MMA. places:
    // key_places() of Format.
    template <int units, class Format, class Query>
    __device__ static void multiply_queries(Accumulator (&sum)[units], const char *first, const Places &places,
                                            Query &&q, Format of) {
        for_keys<2 * units, 2>(
            first, 0, places,
            [&](int step, int j, const uint32_t (&pairs)[2][4]) {
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    multiply(sum[j / 2],
                             FragmentA{pairs[0][2 * i], pairs[1][2 * i], pairs[0][2 * i + 1], pairs[1][2 * i + 1]},
                             q(step + i), Multiplied<Format>{});
            },
            of);
    }

    // The values of a unit as A, transposed, all columns: calls add(j, a) for column tiles 2 j and 2 j + 1. places:
    // value_places() of Format.
    template <class Format, class Add>
    __device__ static void for_values(const char *unit, bool packed, const Places &places, Add &&add, Format) {
        if constexpr (Format::bits == 16) {
            const Rows &rows = *reinterpret_cast<const Rows *>(unit);
            const uint32_t address = rows.address(ptx::laneid() % 8 + 8 * (ptx::laneid() / 16), ptx::laneid() / 8 % 2);
#pragma unroll
            for (int j = 0; j < dim / 16; ++j) {
                FragmentA a;
                ptx::ldmatrix_x4_trans(a, Rows::moved(address, 0, 2 * j));
                add(j, a);
            }
        } else {
            const unsigned lane = ptx::laneid(), eighth = lane / 4, key = 2 * (lane % 4);
            constexpr int most = (dim <= 128 ? 128 : 64) / Format::bits;   // values of a load
            constexpr int at_once = dim / 8 < most ? dim / 8 : most;
            uint32_t scales[2];
#pragma unroll
            for (int first = 0; first < dim / 8; first += at_once) {
                const auto words = [&](int odd, int eight) {
                    const char *rows = unit + (odd + eight) * code_bytes<Format>;
                    if constexpr (one_chunk<Format>) return share<Format, at_once>(rows + places.codes, first);
                    else   // the odd row may be swizzled otherwise
                        return share<Format, at_once>(rows - odd * code_bytes<Format>, false, key + odd,
                                                      (eighth * (dim / 8) + first) / at_once);
                };
                // The scale of key 2 t + odd + eight, from value `value` of the run on.
                const auto scale = [&](int odd, int eight, int value) -> uint32_t {
                    const char *row = unit + places.scales + (odd + eight) * scale_bytes<Format>;
                    return static_cast<uint8_t>(row[value / Format::block + odd * odd_scales<Format>(packed)]);
                };
                const auto row0 = words(0, 0), row1 = words(1, 0), row8 = words(0, 8), row9 = words(1, 8);
#pragma unroll
                for (int eight = 0; eight < at_once / 8; ++eight) {
                    const int value = first + 8 * eight;
                    if (value % Format::block == 0)
#pragma unroll
                        for (int i = 0; i < 2; ++i)
                            scales[i] = Format::scales(scale(0, 8 * i, value), scale(1, 8 * i, value));
                    uint32_t near[8], far[8];
                    constexpr int words_of_eight = Format::bits / 4;
                    pairs_of_rows<Format>(row0.word + eight * words_of_eight, row1.word + eight * words_of_eight,
                                          scales[0], near);
                    pairs_of_rows<Format>(row8.word + eight * words_of_eight, row9.word + eight * words_of_eight,
                                          scales[1], far);
#pragma unroll
                    for (int i = 0; i < 8; i += 2)
                        add((value + i) / 2, FragmentA{near[i], near[i + 1], far[i], far[i + 1]});
                }
            }
        }
    }

    // Expands quarter `part` of the columns of a tile of V.
    template <class Format>
    __device__ static void expand_columns(Columns &to, const char *unit, int part, Format) {
        constexpr int row_chunks = tile_keys * Format::bits / 128, count = quarter * row_chunks,
                      eights = Format::chunk_values / 8;
        constexpr int depth = Format::bits == 8 ? 32 : 64, step_blocks = depth / Format::block,
                      of_word = 4 / step_blocks;
        constexpr int groups = ceil_div(dim, 4 * 32 * of_word);
        using Codes = SharedTile<quarter, tile_keys * Format::bits / 8>;
        const uint8_t *scales = reinterpret_cast<const uint8_t *>(unit) + 16 * count;
        const int first_group = part * quarter / (32 * of_word);
        expand_all<Format, count>(to, unit, [&](int i) {
            const int row = i / row_chunks,
                      chunk = Codes::index(row, i % row_chunks) - row * row_chunks;   // its own inverse
            const int column = part * quarter + row, j = column / 8, lane = 4 * (column % 8) + j % 4;
            const auto scale = [&](int of_chunk) -> uint32_t {
                const int block = chunk * Format::chunk_values / Format::block + of_chunk;
                const int word = (block / step_blocks * groups + j / 4 / of_word - first_group) * 32 + lane;
                return scales[4 * word + j / 4 % of_word * step_blocks + block % step_blocks];
            };
            return Chunk{row, chunk * eights, {scale(0), scale(scales_of_chunk<Format> > 1)}};
        });
    }

private:
    // The type of the MMAs of keys.
    template <class Format>
    using Multiplied = std::conditional_t<is_half<Format>, __half, Element>;

    // Calls use(step, j, pairs) for MMAs `step` and step + 1 of keys 8 (group + j) .. of consecutive units, with two
    // pairs for each MMA, and those of the next groups, `together` in all.
    template <int groups, int together, class Format, class Use>
    __device__ static void for_keys(const char *units, int group, const Places &places, Use &&use, Format) {
        const unsigned key = ptx::laneid() / 4u, first = ptx::laneid() % 4u * (dim / 4);
        // Values of a load, and loads in the code: rolled loops keep the code of a tile within the instruction cache.
        // Many groups load few values at a time, which occupy registers.
        constexpr int most = dim <= 128 && Format::bits < 16 && groups > 4 * (together - 1) ? 16 : 128 / Format::bits;
        constexpr int at_once = dim / 4 < most ? dim / 4 : most;
        constexpr int unrolled = dim <= 128 && Format::bits == 16 ? dim / 4 / at_once : 1;
        using Scales = KeyScales<Format, at_once>;
        Scales scales[groups];
        const auto unit_of = [&](int j) { return units + (group + j) / 2 * row_bytes<Format>(); };
        const auto eight_of = [&](int j) { return (group + j) % 2 * 8; };   // the first row of the group in its unit
        const auto load_scales = [&](int value) {
            if constexpr (Format::bits < 16)
#pragma unroll
                for (int j = 0; j < groups; ++j)
                    scales[j].load(unit_of(j) + places.scales + eight_of(j) * scale_bytes<Format> +
                                   value / Format::block);
        };
        if constexpr (Scales::once) load_scales(0);
#pragma unroll unrolled
        for (int value = 0; value < dim / 4; value += at_once) {
            if constexpr (!Scales::once) load_scales(value);
            Share<at_once * Format::bits / 32> words[groups];
#pragma unroll
            for (int j = 0; j < groups; ++j) {
                const char *rows = unit_of(j) + eight_of(j) * code_bytes<Format>;   // rows 8 apart are swizzled alike
                if constexpr (one_chunk<Format>) words[j] = share<Format, at_once>(rows + places.codes, value);
                else words[j] = share<Format, at_once>(rows, true, key, (first + value) / at_once);
            }
#pragma unroll
            for (int eight = 0; eight < at_once / 8; ++eight) {
#pragma unroll
                for (int j = 0; j < groups; j += together) {
                    uint32_t pairs[together][4];
#pragma unroll
                    for (int i = 0; i < together; ++i)
                        pairs_of_row<Format>(words[j + i].word + eight * Format::bits / 4,
                                             scales[j + i].of(value + 8 * eight), pairs[i]);
                    use(value / 4 + 2 * eight, j, pairs);
                }
            }
        }
    }

    template <class Format>
    static constexpr int scales_of_chunk =
        Format::chunk_values > Format::block ? Format::chunk_values / Format::block : 1;

    // The target of a chunk of codes, and the bytes of its scales.
    struct Chunk {
        int row, first;
        uint32_t scale[2];
    };

    // Bytes from a row of codes to the next one, and of scales; how much further on the scales of an odd row are.
    template <class Format>
    static constexpr int code_bytes = dim * Format::bits / 8;
    template <class Format>
    static constexpr int scale_bytes = 4 * scale_words<Format>;
    template <class Format>
    __device__ static int odd_scales(bool packed) {
        return packable<Format> && packed ? 2 : 0;
    }

    // Whether a lane's codes of a row are in one chunk, where even rows are swizzled as the next one.
    template <class Format>
    static constexpr bool one_chunk = Format::bits == 4 && dim <= 128;

    // Places of the part-th run of `values` values of a row.
    template <class Format, int values>
    __device__ static Places places(bool keys, unsigned row, unsigned part, bool packed) {
        Places result{};
        if constexpr (Format::bits < 16)
            result.scales = cached_rows * code_bytes<Format> + row * scale_bytes<Format> +
                            part * values / Format::block + row % 2 * odd_scales<Format>(packed);
        if constexpr (one_chunk<Format>) {
            constexpr unsigned runs = 32 / values;   // of a chunk
            result.codes = 16 * place(dim / 32, keys, row, part / runs) + part % runs * (values / 2);
        }
        return result;
    }

    // The part-th run of `values` values of a row, or those from value `first` of a lane's run on.
    template <int words>
    struct Share {
        uint32_t word[words];
    };
    template <class Format, int values>
    __device__ static auto share(const char *unit, bool keys, unsigned row, unsigned part) {
        constexpr int bytes = values * Format::bits / 8, row_chunks = dim * Format::bits / 128;
        if constexpr (bytes >= 16) {
            Share<bytes / 4> result;
#pragma unroll
            for (int i = 0; i < bytes / 16; ++i) {
                const int at = place(row_chunks, keys, row, part * (bytes / 16) + i);
                const uint4 four = reinterpret_cast<const uint4 *>(unit)[at];
                result.word[4 * i] = four.x, result.word[4 * i + 1] = four.y;
                result.word[4 * i + 2] = four.z, result.word[4 * i + 3] = four.w;
            }
            return result;
        } else {
            constexpr int parts = 16 / bytes;   // of a chunk
            return share<Format, values>(
                unit + 16 * place(row_chunks, keys, row, part / parts) + bytes * (part % parts), 0);
        }
    }
    template <class Format, int values>
    __device__ static auto share(const char *run, int first) {
        constexpr int bytes = values * Format::bits / 8;
        const char *const from = run + first * Format::bits / 8;
        Share<bytes / 4> result;
        if constexpr (bytes == 16) {
            const uint4 four = *reinterpret_cast<const uint4 *>(from);
            result.word[0] = four.x, result.word[1] = four.y, result.word[2] = four.z, result.word[3] = four.w;
        } else if constexpr (bytes == 8) {
            const uint2 two = *reinterpret_cast<const uint2 *>(from);
            result.word[0] = two.x, result.word[1] = two.y;
        } else {
            static_assert(bytes == 4, "a word is the least");
            result.word[0] = *reinterpret_cast<const uint32_t *>(from);
        }
        return result;
    }

    // The factors of a quarter of a row of keys. They are converted two at once, before the loop over its values if
    // there are at most two. of() is a pair of equal ones.
    template <class Format, int values>
    struct KeyScales {
        static constexpr int blocks = dim / 4 / Format::block;   // of a quarter; 0: it is part of a block
        static constexpr bool once = blocks <= 2;
        static_assert(once || values == 2 * Format::block, "a load needs two factors");
        uint32_t two;

        __device__ void load(const char *from) {
            if constexpr (blocks < 2) {
                const uint32_t scale = static_cast<uint8_t>(*from);
                two = Format::scales(scale, scale);
            } else {
                two = Format::scales(*reinterpret_cast<const uint16_t *>(from));
            }
        }
        // Those of value `at` of the quarter.
        __device__ uint32_t of(int at) const {
            if constexpr (blocks < 2) return two;
            else return ptx::mov_b32_half_twice(two, at & Format::block);
        }
    };
    template <int values>
    struct KeyScales<CachedPlain, values> {
        static constexpr bool once = true;
        __device__ uint32_t of(int) const { return 0; }
    };

    // Expands all chunks of codes of a unit to 16 bits, at place_of(i). A warp reads several chunks per lane before it
    // writes any: up to dim 128 all of them, so that `to` may overlap the unit.
    template <class Format, int count, class Tile, class PlaceOf>
    __device__ static void expand_all(Tile &to, const char *unit, PlaceOf &&place_of) {
        constexpr int eights = Format::chunk_values / 8, of_block = Format::block / 8, of_lane = count / 32,
                      at_once = dim <= 128 ? of_lane : 2;
        static_assert(count % 32 == 0 && of_lane % at_once == 0, "whole rounds");
#pragma unroll 1
        for (int first = 0; first < of_lane; first += at_once) {
            uint4 codes[at_once];
            Chunk places[at_once];
#pragma unroll
            for (int i = 0; i < at_once; ++i) {
                const int at = 32 * (first + i) + ptx::laneid();
                codes[i] = reinterpret_cast<const uint4 *>(unit)[at];
                places[i] = place_of(at);
            }
            ptx::bar_warp_sync();   // every lane has read its chunks and scales
#pragma unroll
            for (int i = 0; i < at_once; ++i) {
                const uint32_t words[4] = {codes[i].x, codes[i].y, codes[i].z, codes[i].w};
                uint32_t scale = 0;
#pragma unroll
                for (int eight = 0; eight < eights; ++eight) {
                    if (eight % of_block == 0) {
                        scale = Format::scales(places[i].scale[eight / of_block] * 0x101u);
                    }
                    to.at(places[i].row, places[i].first + eight) = Format::expand(words, eight, scale);
                }
            }
        }
    }
};

// The unit of a chunk whose addresses a lane has, and whether they are of keys or of values. A warp copies the units of
// a tile in the order of the lanes: `units` of keys, then as many of values.
template <int units>
__device__ inline unsigned lane_unit() {
    const unsigned lane = ptx::laneid();
    return lane / (2 * units) * units + lane % units;
}
template <int units>
__device__ inline bool lane_has_keys() {
    return (ptx::laneid() & units) == 0;
}
// The data of lane `lane` modulo 32, for all lanes.
__device__ inline const char *of_unit(const char *address, int lane) {
    const unsigned long long bits = reinterpret_cast<unsigned long long>(address);
    const unsigned low = ptx::shfl_sync_idx_b32(unsigned(bits), lane), high = ptx::shfl_sync_idx_b32(bits >> 32, lane);
    return reinterpret_cast<const char *>(static_cast<unsigned long long>(high) << 32 | low);
}

// The value itself, in a register: no compiler computes it anew where it is used.
__device__ inline unsigned kept(unsigned value) { return ptx::shfl_sync_idx_b32(value, ptx::laneid()); }
__device__ inline const char *kept(const char *address) { return of_unit(address, ptx::laneid()); }

// The part of the lanes, of `parts`, to which a lane belongs.
template <int parts>
__device__ inline unsigned lane_part() {
    return static_cast<unsigned>(ptx::laneid()) / (32 / parts);
}

// Masks of B of 16 keys, with the bits set of keys for which seen(key) is true.
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

// Q as A, with the column order of keys as B; rows 8 .. 15 are zeros if there is one octet of rows. row_of(row) is the
// address of a row, null for zeros; a row has `columns` values, a multiple of eight.
template <class Element, int dim, int octets, class RowOf>
__device__ inline void load_queries(FragmentA (&a)[dim / 16], int columns, RowOf &&row_of) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const Element *row = half < octets ? row_of(accumulator_row(2 * half)) : nullptr;
#pragma unroll
        for (int eight = 0; eight < dim / 32; ++eight) {
            const int column = ptx::laneid() % 4 * (dim / 4) + 8 * eight;
            uint32_t words[4], pairs[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                words[i] = row && column < columns ? __ldg(reinterpret_cast<const uint32_t *>(row + column) + i) : 0;
            pairs_of_row<CachedPlain>(words, 0, pairs);
#pragma unroll
            for (int i = 0; i < 4; ++i) a[2 * eight + i / 2][2 * (i % 2) + half] = pairs[i];
        }
    }
}

// A pair of queries in bfloat16 as f16, times 2^8. `fits` becomes false if one is not 0 and no normal number of f16.
__device__ inline uint32_t lifted_half(uint32_t pair, bool &fits) {
    const float2 values = unpack_pair(pair, __nv_bfloat16{});
    const float low = values.x * CachedMxfp8Half::lift, high = values.y * CachedMxfp8Half::lift;
    const auto is_normal = [](float value) {
        const float size = fabsf(value);
        return size == 0.0f || (size >= 0x1p-14f && size < 0x1p16f);
    };
    fits = fits && is_normal(low) && is_normal(high);
    return ptx::cvt_rn_f16x2_f32(high, low);
}

__device__ inline void copy(Accumulator &to, const Accumulator &from) {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = from[i];
}

// Scores of the keys of a tile for eight queries, on their way from sums of keys times queries, whose rows are keys, to
// rows of queries: a row of queries for each key. Odd and even keys are swapped in every other four, so that
// neither storing nor loading has bank conflicts.
struct TurnedScores {
    float2 pairs[tile_keys][4];

    // Where a lane stores and loads, in bytes: key g or its neighbor, and query g of keys 2 t and 2 t + 1.
    struct Places {
        unsigned store, load;
    };
    __device__ static Places places() {
        const unsigned lane = ptx::laneid(), row = lane / 4, part = lane % 4;
        constexpr unsigned bytes = sizeof(pairs[0]);   // of a key
        return {bytes * (row ^ row / 4 % 2) + 8 * part, bytes * (2 * part ^ part / 2) + 4 * row};
    }

    // Stores the sums of keys 16 unit .. 16 unit + 15, times `factor`.
    __device__ void store(const Places &places, int unit, const Accumulator &sum, float factor) {
        char *const rows = reinterpret_cast<char *>(pairs[mma_rows * unit]) + places.store;
#pragma unroll
        for (int half = 0; half < 2; ++half)
            *reinterpret_cast<float2 *>(rows + half * 8 * sizeof(pairs[0])) = {sum[2 * half] * factor,
                                                                               sum[2 * half + 1] * factor};
    }
    // The scores of query g and keys 8 j + 2 t and 8 j + 2 t + 1.
    __device__ void load(const Places &places, float (&scores)[2], int j) const {
        const char *const rows = reinterpret_cast<const char *>(pairs[mma_columns * j]);
#pragma unroll
        for (int i = 0; i < 2; ++i)
            scores[i] = *reinterpret_cast<const float *>(rows + (places.load ^ i * unsigned(sizeof(pairs[0]))));
    }
};

// The accumulators of a warp in shared memory, for another warp: `columns` columns of O as rows of accumulators, for
// each 8 rows of Q.
template <int columns, int octets>
struct WarpNode {
    static constexpr int tiles = columns / mma_rows;
    float4 o[octets][tiles][32];
    float max[octets][32], sum[octets][32];

    __device__ float4 &accumulator(int octet, int j) { return o[octet][j][ptx::laneid()]; }
    __device__ float &row_max(int octet) { return max[octet][ptx::laneid()]; }
    __device__ float &row_sum(int octet) { return sum[octet][ptx::laneid()]; }
};

}   // namespace tile
