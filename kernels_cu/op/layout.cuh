// Bytes moved unchanged: rows of another length, bytes of rows by place, and scales to and from the tiles of cuBLAS.
#pragma once

#include <cstdint>

#include "../ptx/math.cuh"

namespace op {

constexpr int layout_threads = 256;
constexpr int layout_tile = 4 * layout_threads;   // bytes of a block: one word per thread

__device__ inline size_t first_byte() { return (size_t(blockIdx.x) * layout_threads + threadIdx.x) * 4; }

// n / d and the remainder, for 0 <= n < 2^42, which is more than a grid has bytes, and d > 0. The compiler's 64-bit
// division is a call, and 32 bits are too few for 4 GiB. A float quotient has a relative error of 2^-21, and the
// remainder is exact; a second step leaves an error of at most 1.25.
struct Quotient {
    int64_t quotient = 0, rest;

    __device__ Quotient(int64_t n, int64_t d) : rest(n) {
        const float inverse = ptx::rcp_approx_ftz_f32(float(d));
#pragma unroll
        for (int i = 0; i < 2; ++i) add(__float2ll_rz(float(rest) * inverse), d);
        if (rest < 0) add(-1, d);
        if (rest < 0) add(-1, d);
        if (rest >= d) add(1, d);
    }
    __device__ void add(int64_t part, int64_t d) { quotient += part, rest -= part * d; }
};

// The four bytes at an aligned address.
__device__ inline uint32_t word_at(const uint8_t *x, size_t at) { return *reinterpret_cast<const uint32_t *>(x + at); }
__device__ inline void store_word(uint8_t *x, size_t at, uint32_t word) {
    *reinterpret_cast<uint32_t *>(x + at) = word;
}

// Stores the bytes at .. at + 3 of an array of `count` bytes; next() returns them in order. at < count is a multiple of
// 4.
template <class Source>
__device__ inline void store_bytes(uint8_t *target, size_t at, size_t count, Source &&next) {
    const int there = min(count - at, size_t(4));
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (i < there) word |= uint32_t(next()) << (8 * i);
    if (there == 4) {
        store_word(target, at, word);
    } else {
#pragma unroll 1
        for (int i = 0; i < there; ++i) target[at + i] = word >> (8 * i);
    }
}

__device__ inline void fill(float *x, float value, size_t count) {
    const size_t i = size_t(blockIdx.x) * layout_threads + threadIdx.x;
    if (i < count) x[i] = value;
}

// A place in rows of `width`, which moves on element by element.
struct RowPlace {
    size_t row, column, width;

    __device__ RowPlace(size_t at, size_t width) : width(width) {
        const Quotient place(at, width);
        row = place.quotient, column = place.rest;
    }
    // Moves on by one element. Returns whether that begins another row.
    __device__ bool advance() {
        const bool ended = ++column == width;
        if (ended) column = 0, ++row;
        return ended;
    }
};

// y[rows, target_bytes] from x[rows, source_bytes]: rows are cut, or padded with zeros.
__device__ inline void pad_last(const uint8_t *x, uint8_t *y, size_t rows, size_t source_bytes, size_t target_bytes) {
    const size_t at = first_byte(), count = rows * target_bytes;
    if (at >= count) return;
    RowPlace place(at, target_bytes);
    const uint8_t *source = x + place.row * source_bytes;
    if ((source_bytes | target_bytes) % 4 == 0) {   // each word comes from one word
        store_word(y, at, place.column < source_bytes ? word_at(source, place.column) : 0);
        return;
    }
    store_bytes(y, at, count, [&] {
        const uint8_t byte = place.column < source_bytes ? source[place.column] : uint8_t(0);
        if (place.advance()) source += source_bytes;
        return byte;
    });
}

// y[rows, count] = the bytes of x[rows, width] at places[count] of each row.
__device__ inline void gather_bytes(const uint8_t *x, const int *places, uint8_t *y, size_t rows, size_t width,
                                    size_t count) {
    if (first_byte() >= rows * count) return;
    RowPlace place(first_byte(), count);
    const uint8_t *source = x + place.row * width;
    store_bytes(y, first_byte(), rows * count, [&] {
        const uint8_t byte = source[places[place.column]];
        if (place.advance()) source += width;
        return byte;
    });
}

// A matrix of scales [rows, blocks] is stored in tiles of 128 rows x 4 blocks, 512 bytes each. The tiles of a row of
// tiles are consecutive; row r and block b of a tile are byte (r % 32) 16 + (r / 32) 4 + b. Source: cuBLAS, "1D block
// scaling". Row `outer` cols + col of that matrix is scales[outer][.][col].
struct ScaleTiles {
    size_t outer, blocks, cols;

    __device__ size_t row_tiles() const { return (blocks + 3) / 4; }

    // Whether each word of the tiles is one word of the scales.
    __device__ bool whole_words() const { return cols == 1 && blocks % 4 == 0; }

    // The offset of the scale of a row and a block.
    __device__ size_t offset(size_t row, size_t block) const {
        const int in_tile = row % 128;
        return (row / 128 * row_tiles() + block / 4) * 512 + (in_tile % 32 * 16 + in_tile / 32 * 4 + int(block % 4));
    }
};

// Scales that a quantizer stores in tiles, an array of `bytes` bytes; places past its end are left out.
// takes_registers: a store needs registers, so callers store scales after those of the values are free.
struct TiledScales {
    static constexpr bool takes_registers = true;
    uint8_t *scales;
    size_t bytes;
    ScaleTiles tiles;
    size_t first = 0;   // the block from which store() counts

    __device__ void put(size_t row, size_t block, uint32_t scale) const {
        const size_t at = tiles.offset(row, block);
        if (at < bytes) scales[at] = scale;
    }

    // For blocks along rows: store() takes the number of a block among the blocks of all rows, counted from the number
    // that from() was given.
    __device__ TiledScales from(size_t number) const { return {scales, bytes, tiles, number}; }
    __device__ void store(int number, uint32_t scale) const {
        const Quotient row(first + number, tiles.blocks);
        put(row.quotient, row.rest, scale);
    }

    // Stores zeros in the places of tiles without a scale: rows after the last one, and blocks after the last one of
    // each row. Threads without values call it, numbered from 0; the grid has such threads where tiles have such
    // places.
    __device__ void fill(size_t thread, size_t threads) const {
        const size_t rows = tiles.outer * tiles.cols;
        if (const int there = rows % 128) {
            const size_t last = tiles.offset(rows - there, 0);
#pragma unroll 1
            for (size_t word = thread; word < tiles.row_tiles() * 128; word += threads)   // as in swizzle_scales()
                if (int(word % 4 * 32 + word % 128 / 4) >= there && last + word * 4 + 4 <= bytes)
                    store_word(scales, last + word * 4, 0);
        }
        if (tiles.blocks % 4 == 0) return;
#pragma unroll 1
        for (size_t row = thread; row < rows; row += threads)
#pragma unroll 1
            for (size_t block = tiles.blocks; block % 4; ++block) put(row, block, 0);
    }
};

// Scales in the order of their blocks, with the members of TiledScales.
struct LinearScales {
    static constexpr bool takes_registers = false;
    uint8_t *first;

    __device__ LinearScales from(size_t number) const { return {first + number}; }
    __device__ void store(int number, uint32_t scale) const { first[number] = scale; }
    __device__ void fill(size_t, size_t) const {}
};

// Calls body(scales) with one of the two for a matrix of rows with `blocks` blocks each. The layout is a type, not a
// branch at every store, so that linear scales do not pay for tiles.
template <class Body>
__device__ inline void with_scales(uint8_t *scales, bool swizzled, int64_t bytes, int64_t rows, int64_t blocks,
                                   Body &&body) {
    if (swizzled) body(TiledScales{scales, size_t(bytes), {size_t(rows), size_t(blocks), 1}});
    else body(LinearScales{scales});
}

// swizzled[bytes] = the tiles of scales[outer, blocks, cols]; places without a scale become 0.
__device__ inline void swizzle_scales(const uint8_t *scales, uint8_t *swizzled, ScaleTiles tiles, size_t bytes) {
    const size_t at = first_byte();
    if (at >= bytes) return;
    // A word holds four blocks of a row. A grid has fewer than 2^32 tiles.
    const uint32_t tile = at / 512, row_tiles = tiles.row_tiles(), word = at % 512 / 4;
    const size_t row = size_t(tile / row_tiles) * 128 + word % 4 * 32 + word / 4, block = size_t(tile % row_tiles) * 4;
    if (tiles.whole_words() && at + 4 <= bytes) {
        store_word(swizzled, at, row < tiles.outer ? word_at(scales, row * tiles.blocks + block) : 0);
        return;
    }
    const RowPlace line(row, tiles.cols);   // row: outer
    int left = line.row < tiles.outer ? min(tiles.blocks - block, size_t(4)) : 0;
    const uint8_t *source = scales + (line.row * tiles.blocks + block) * tiles.cols + line.column;
    store_bytes(swizzled, at, bytes, [&] {
        const uint8_t scale = left-- > 0 ? *source : uint8_t(0);
        source += tiles.cols;
        return scale;
    });
}

// scales[outer, blocks, cols] from their tiles swizzled[bytes]; 0 past the end of the tiles.
__device__ inline void unswizzle_scales(const uint8_t *swizzled, uint8_t *scales, size_t bytes, ScaleTiles tiles) {
    const size_t at = first_byte(), count = tiles.outer * tiles.blocks * tiles.cols;
    if (at >= count) return;
    if (tiles.whole_words() && bytes % 4 == 0) {
        const RowPlace place(at, tiles.blocks);
        const size_t offset = tiles.offset(place.row, place.column);
        store_word(scales, at, offset < bytes ? word_at(swizzled, offset) : 0);
        return;
    }
    RowPlace line(at, tiles.cols);           // row: outer and block
    RowPlace slab(line.row, tiles.blocks);   // row: outer, column: block
    store_bytes(scales, at, count, [&] {
        const size_t offset = tiles.offset(slab.row * tiles.cols + line.column, slab.column);
        if (line.advance()) slab.advance();
        return offset < bytes ? swizzled[offset] : uint8_t(0);
    });
}

}   // namespace op
