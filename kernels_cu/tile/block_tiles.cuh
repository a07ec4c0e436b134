// Tiles of keys and values in block formats, and of values in 16 bits: the same bytes in global and in shared memory.
//
// A tile is one struct, so a bulk copy loads it without address arithmetic. Kernels that write tiles and kernels that
// read them share its definition. Source of the operand layouts: PTX ISA 9.0, 9.7.14.3 and 9.7.14.5.
#pragma once

#include <cstdint>

#include "../kernel.cuh"
#include "../ptx/cvt.cuh"
#include "../ptx/ldmatrix.cuh"
#include "../ptx/warp.cuh"
#include "fragment.cuh"
#include "shared.cuh"

namespace tile {

constexpr int tile_keys = 64;   // of every tile of keys and values

// The block formats as operands: bits of a code, values per scale, depth of an MMA in values, and MMAs along the depth
// that one 32-bit word of scales serves.
struct Mxfp8 {
    static constexpr int bits = 8, block = 32, depth = 32, steps_per_word = 4;
};
struct Mxfp4 {
    static constexpr int bits = 4, block = 32, depth = 64, steps_per_word = 2;
};
struct Nvfp4 {
    static constexpr int bits = 4, block = 16, depth = 64, steps_per_word = 1;
};

// Values in 16 bits, without scales.
struct Bf16 {
    using Element = __nv_bfloat16;
    static constexpr int bits = 16;
};

// The order of a tile's keys as columns of S. An MMA whose A is P takes 4 (e4m3) or 8 (e2m1) consecutive keys from a
// lane; S leaves two in each tile of 8 columns. So columns are assigned to keys such that a lane has the scores of the
// keys that it needs, and P stays in registers. `column` is a column of the 8-column tile `j`.
struct NaturalKeys {   // P in 16 bits
    __host__ __device__ static constexpr int key(int j, int column) { return 8 * j + column; }
};
struct KeysByFours {   // P in e4m3, MMAs 32 deep
    __host__ __device__ static constexpr int key(int j, int column) {
        return 16 * (j >> 1) + 4 * (column >> 1) + 2 * (j & 1) + (column & 1);
    }
};
struct KeysByEights {   // P in e2m1, MMAs 64 deep
    __host__ __device__ static constexpr int key(int j, int column) {
        return 32 * (j >> 2) + 8 * (column >> 1) + 2 * (j & 3) + (column & 1);
    }
};

// `keys` keys of `dim` values, in natural order, with their scales along `dim`.
//
// Rows of codes are placed and swizzled so that ldmatrix has no bank conflicts in any of the three orders: eight rows
// whose numbers differ in bits {0, 1, 2}, {0, 2, 3} or {0, 3, 4} get eight different groups of four banks. Rows of an
// odd multiple of 32 bytes spread over four groups, two chunks each, by two bits of their place. There bit 3 of a row's
// number is added to bit 1 of its place, and bits 2 and 4 decide between the two chunks.
template <class Format_, int keys_, int dim_>
struct alignas(128) KeyTile {
    using Format = Format_;
    static constexpr int keys = keys_, dim = dim_;
    static constexpr int row_bytes = dim * Format::bits / 8, row_chunks = row_bytes / 16;
    static constexpr int steps = dim / Format::depth;                // MMAs deep
    static constexpr int words = ceil_div(dim / Format::block, 4);   // of scales, of a key
    static_assert(dim % Format::depth == 0, "dim is whole MMAs; fill it up with zeros");

    uint4 chunks[keys * row_chunks];
    uint32_t scales[keys][words];   // block b: byte b % 4 of word b / 4; scales past dim are not read

    static constexpr int power = row_chunks % 8 == 0 ? 3 : row_chunks % 4 == 0 ? 2 : 1;
    static constexpr int swizzled_chunks = 1 << power;

    // The place of a row, and the swizzle: a row's chunk number is xored with it. Both are linear in the bits of `row`,
    // so parts of a row number can be placed and swizzled separately.
    __host__ __device__ static constexpr int place(int row) { return power == 1 ? row ^ (row >> 3 & 1) << 1 : row; }
    __host__ __device__ static constexpr int swizzle(int row) {
        const int near = row >> (3 - power), far = power == 1 ? row >> 4 : (row >> 3 & 3) << (power > 2 ? 1 : 0);
        return (near ^ far) & (swizzled_chunks - 1);
    }
    __host__ __device__ static constexpr int index(int row, int chunk) {
        return place(row) * row_chunks + (chunk ^ swizzle(row));
    }

    __device__ uint4 &at(int row, int chunk) { return chunks[index(row, chunk)]; }

    // This lane's part of addresses of B fragments: two neighbouring column tiles, the chunks of one MMA's depth.
    template <class Order>
    __device__ uint32_t lane_address() const {
        const int lane = ptx::laneid();
        return static_cast<uint32_t>(__cvta_generic_to_shared(chunks)) +
               16 * index(Order::key(lane / 16, lane % 8), lane / 8 % 2);
    }

    // B of the column tiles 2 pair and 2 pair + 1 at MMA `step`, preferably a constant. lane_address is that of
    // lane_address().
    template <class Order, int pair>
    __device__ static void load_b(FragmentB (&b)[2], uint32_t lane_address, int step) {
        constexpr int row = Order::key(2 * pair, 0);
        const int chunk = 2 * step, swizzled = chunk & (swizzled_chunks - 1);
        uint32_t registers[4];
        ptx::ldmatrix_x4(registers, (lane_address ^ (16 * (swizzled ^ swizzle(row)))) +
                                        16 * (chunk - swizzled + place(row) * row_chunks));
#pragma unroll
        for (int i = 0; i < 4; ++i) b[i / 2][i % 2] = registers[i];
    }

    // The scale words of the column tiles 4 group .. 4 group + 3: thread t of each quad carries tile 4 group + t.
    template <class Order>
    __device__ const uint32_t (&scales_b(int group) const)[words] {
        const int lane = ptx::laneid();
        return scales[Order::key(4 * group + lane % 4, lane / 4)];
    }
};

// `keys` keys of `dim_v` values, transposed: a row is one column of V, with its scales along the keys.
template <class Format_, int keys_, int dim_v_>
struct alignas(128) ValueTile {
    using Format = Format_;
    static constexpr int keys = keys_, dim_v = dim_v_;
    static constexpr int row_bytes = keys * Format::bits / 8, row_chunks = row_bytes / 16;
    static constexpr int steps = keys / Format::depth;                  // MMAs deep
    static constexpr int step_blocks = Format::depth / Format::block;   // scales of a row for one MMA
    static constexpr int columns_per_word = 4 / step_blocks;            // groups of 4 column tiles to a word
    static constexpr int groups = ceil_div(dim_v, 32 * columns_per_word);
    static_assert(keys % Format::depth == 0 && dim_v % 16 == 0, "whole MMAs");

    SharedTile<dim_v, row_bytes> codes;
    uint32_t scales[steps][groups][32];   // of lanes: see place()

    // Where the scale of column `column` of V for key block `block` stands among the bytes of `scales`: column tile j =
    // column / 8 is thread j % 4 of a quad, and byte group j / 4 of it.
    __host__ __device__ static constexpr int place(int column, int block) {
        const int j = column / 8, lane = 4 * (column % 8) + j % 4, step = block / step_blocks;
        const int group = j / 4 / columns_per_word, byte = j / 4 % columns_per_word * step_blocks + block % step_blocks;
        return 4 * ((step * groups + group) * 32 + lane) + byte;
    }

    __device__ uint32_t scales_b(int step, int group) const { return scales[step][group][ptx::laneid()]; }
};

// `keys` keys of `dim_v` values in 16 bits.
template <int keys_, int dim_v_>
struct alignas(128) ValueTile<Bf16, keys_, dim_v_> : SharedTile<keys_, dim_v_ *int(sizeof(Bf16::Element))> {
    using Format = Bf16;
};

// The row of a slice (0..15) whose scales of A this lane carries if a register holds two words of them, or one word in
// each lane of a pair; and its half of the rows: even lanes carry row g, odd lanes row g + 8.
__device__ inline int scale_half() { return ptx::laneid() % 2; }
__device__ inline int scale_row() { return ptx::laneid() / 4 + 8 * scale_half(); }

// The row whose word of scales this lane carries if one register serves 32 rows: two slices of A, or the columns of
// four column tiles of B.
__device__ inline int scale_word_row() { return ptx::laneid() % 4 * 8 + ptx::laneid() / 4; }

// Loads the codes of one row of A of this lane, g or g + 8 by `half`, for all steps, from the `bytes` bytes at
// `source`; missing ones are zeros.
template <bool rolled, int steps>
__device__ inline void load_codes_a(FragmentA (&codes)[steps], int half, const uint8_t *source, int bytes) {
    const int thread = ptx::laneid() % 4;
#pragma unroll(rolled ? 1 : steps)
    for (int step = 0; step < steps; ++step)
#pragma unroll
        for (int chunk = 0; chunk < 2; ++chunk) {
            const int byte = 32 * step + 16 * chunk + 4 * thread;
            codes[step][2 * chunk + half] = byte < bytes ? __ldg(reinterpret_cast<const uint32_t *>(source + byte)) : 0;
        }
}

// Loads the scales of A of the row scale_row() from the `blocks` scales at `source`. A register has `register_words`
// words of four, each in lanes of its own.
template <bool rolled, int register_words, int registers>
__device__ inline void load_scales_a(uint32_t (&scales)[registers], const uint8_t *source, int blocks) {
    const int word_of_lane = ptx::laneid() % 4 / 2 % register_words;
#pragma unroll(rolled ? 1 : registers)
    for (int i = 0; i < registers; ++i) {
        uint32_t word = 0;
#pragma unroll
        for (int byte = 0; byte < 4; ++byte) {
            const int block = 4 * (register_words * i + word_of_lane) + byte;
            if (block < blocks) word |= uint32_t(__ldg(source + block)) << (8 * byte);
        }
        scales[i] = word;
    }
}

// c += A B of one MMA, for codes with scales. The selectors, byte and thread of each operand's scales, are constants.
template <int byte_a, int thread_a, int byte_b, int thread_b>
__device__ inline void multiply(Accumulator &c, Mxfp8, const uint32_t (&a)[4], uint32_t scale_a, const FragmentB &b,
                                uint32_t scale_b) {
    ptx::mma_m16n8k32_mxf8f6f4<ptx::E4m3, ptx::E4m3, byte_a, thread_a, byte_b, thread_b>(c, a, b, scale_a, scale_b);
}
template <int byte_a, int thread_a, int byte_b, int thread_b>
__device__ inline void multiply(Accumulator &c, Mxfp4, const uint32_t (&a)[4], uint32_t scale_a, const FragmentB &b,
                                uint32_t scale_b) {
    ptx::mma_m16n8k64_mxf4<byte_a, thread_a, byte_b, thread_b>(c, a, b, scale_a, scale_b);
}
template <int byte_a, int thread_a, int byte_b, int thread_b>
__device__ inline void multiply(Accumulator &c, Nvfp4, const uint32_t (&a)[4], uint32_t scale_a, const FragmentB &b,
                                uint32_t scale_b) {
    static_assert(byte_a == 0 && byte_b == 0, "an MMA takes a whole word of scales");
    ptx::mma_m16n8k64_mxf4nvf4<thread_a, thread_b>(c, a, b, scale_a, scale_b);
}

}   // namespace tile
