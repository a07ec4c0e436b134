// Block scales: how they are chosen, how four stand in a word, and which lane carries which to a block-scaled MMA.
#pragma once

#include <cstdint>

#include "../ptx/math.cuh"
#include "../ptx/warp.cuh"

namespace tile {

constexpr int mx_block = 32;          // values that share one ue8m0 scale
constexpr uint32_t ue8m0_nan = 0xff;  // also the scale of a block that holds a NaN or an infinity

// The ue8m0 scale of a block of e2m1 whose largest magnitude is `amax` (NaN if any value is): the exponent of amax less 2,
// which is that of 6, the largest e2m1; clamped to ue8m0's smallest. Source: OCP Microscaling Formats v1.0, 6.3.
__device__ inline uint32_t e2m1_scale(float amax) {
    const int exponent = __float_as_uint(amax) >> 23;   // amax has no sign
    return exponent == 255 ? ue8m0_nan : max(exponent - 2, 0);
}

// 1 / 2^(scale - 127), exact; meaningless for ue8m0_nan and 254, which no finite block of e2m1 has.
__device__ inline float ue8m0_reciprocal(uint32_t scale) { return __uint_as_float((254 - scale) << 23); }

// The largest magnitude of some values; NaN if any is.
template <int count>
__device__ inline float amax_of(const float (&values)[count]) {
    float amax = fabsf(values[0]);
#pragma unroll
    for (int i = 1; i < count; ++i) amax = ptx::max_nan_f32(amax, fabsf(values[i]));
    return amax;
}

// Scales of a tile's rows on their way to the MMA: `row_blocks` scales to a row, packed 4, 2 or 1 to a 32-bit word so that
// every word of a row is equally full; block b of a row is byte b % blocks_per_word of word b / blocks_per_word.
template <int rows, int row_blocks>
struct ScaleWords {
    static constexpr int blocks_per_word = row_blocks % 4 == 0 ? 4 : row_blocks % 2 == 0 ? 2 : 1;
    static constexpr int count = row_blocks / blocks_per_word;
    // Operand A reads 16 rows of two words at once: half the banks apart, they do not conflict.
    static constexpr int stride = rows + (count > 1 && rows % 32 == 0 ? 16 : 0);

    uint32_t words[count][stride];

    // Operand A, 16 rows from `first_row`: thread pair p of each quad carries word `word` + p, its even lane row g, its odd
    // lane row g + 8. A word past the end is repeated from the last; no selector names it.
    __device__ uint32_t operand_a(int word, int first_row) const {
        const int lane = ptx::laneid(), group = lane / 4, thread = lane % 4;
        return words[min(word + thread / 2, count - 1)][first_row + group + 8 * (thread % 2)];
    }

    // Operand B, four tiles of 8 columns whose scales are rows `first_row` .. + 31 here: thread t of each quad carries
    // column g of tile t, so that one load serves four tiles.
    __device__ uint32_t operand_b(int word, int first_row) const {
        const int lane = ptx::laneid(), group = lane / 4, thread = lane % 4;
        return words[word][first_row + 8 * thread + group];
    }
};

// Registers that hold operand A's words for all of a row: two words to a register, one in each thread pair.
template <int row_blocks>
constexpr int operand_a_registers = (ScaleWords<1, row_blocks>::count + 1) / 2;

// How a warp quantizes rows: a lane takes half a block (16 values), eight neighbouring lanes the same half block of eight
// rows, which keeps to all banks where they read a SharedTile and where they write one. A warp finishes one scale word for
// each of its rows in `passes` steps of at most two blocks.
template <int blocks_per_word>
struct QuantizeLanes {
    static constexpr int pass_blocks = blocks_per_word == 1 ? 1 : 2;
    static constexpr int passes = blocks_per_word / pass_blocks;
    static constexpr int rows = 16 / pass_blocks;   // of a warp

    __device__ static int row() {
        const int lane = ptx::laneid();
        return lane % 8 + (pass_blocks == 1 ? lane / 16 * 8 : 0);
    }
    __device__ static int block(int pass) { return pass_blocks * pass + (pass_blocks == 1 ? 0 : ptx::laneid() / 16); }

    // The half block of the row that this lane takes: 16-value units from its start.
    __device__ static int half_block(int word, int pass) {
        return 2 * (word * blocks_per_word + block(pass)) + ptx::laneid() / 8 % 2;
    }

    // The larger of both halves' amax; NaN if either is.
    __device__ static float block_amax(float amax) { return ptx::max_nan_f32(amax, ptx::shfl_sync_bfly_f32(amax, 8)); }

    // A scale in its byte of the word, and the word complete in the lanes that store it.
    __device__ static uint32_t placed(uint32_t scale, int pass) { return scale << (8 * block(pass)); }
    __device__ static uint32_t gathered(uint32_t scales) {
        return pass_blocks == 1 ? scales : scales | ptx::shfl_sync_bfly_b32(scales, 16);
    }
    __device__ static bool stores_scales() { return ptx::laneid() / 8 % (pass_blocks == 1 ? 2 : 4) == 0; }
};

// Eight e2m1 codes of four bits as eight containers (bits 5..2 of a byte), in order over two registers.
__device__ inline void e2m1_containers(uint32_t codes, uint32_t &low, uint32_t &high) {
    const uint32_t even = codes << 2 & 0x3c3c3c3cu, odd = codes >> 2 & 0x3c3c3c3cu;
    low = __byte_perm(even, odd, 0x5140);
    high = __byte_perm(even, odd, 0x7362);
}

}  // namespace tile
