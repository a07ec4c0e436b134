// Stand-ins for matrix loads and stores that only newer architectures have, exact to the bit: lanes exchange bytes
// until each has the same ones.
#pragma once

#include <cstdint>

#include "../warp.cuh"

namespace ptx::portable {

// Registers as the rows of 8x8 matrices of 16-bit elements (sm_80 has no stmatrix).
template <int count>
__device__ inline void stmatrix(uint32_t row_address, const uint32_t (&registers)[count]) {
    const int lane = laneid();
#pragma unroll
    for (int i = 0; i < count; ++i) {
        const uint32_t address = shfl_sync_idx_b32(row_address, 8 * i + lane / 4) + 4 * (lane % 4);
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(registers[i]) : "memory");
    }
}

// The transposed load of 16x16 bytes is one of two 8x8 matrices of byte pairs: a lane 4 g + t then has columns 2 g and
// 2 g + 1 of four rows. For those to be rows 4 t .. 4 t + 3, the first matrix takes rows 4 t and 4 t + 1 of each t, the
// second the others: row i of the 16 goes to a lane of its own.
__device__ inline uint32_t address_for_byte_transpose(uint32_t row_address) {
    const int lane = laneid();
    return shfl_sync_idx_b32(row_address, (lane & 16) | 2 * (lane & 6) | 2 * (lane >> 3 & 1) | (lane & 1));
}

// From columns 2 g and 2 g + 1 to columns g and g + 8. Lanes with g < 4 have columns 0..7, which all belong in `low`;
// the others have those of `high`. In the first exchange, lanes with g < 4 send their even column to lanes with even g,
// the others send their odd column to lanes with odd g. In the second exchange, each sends its other column to the
// other lanes.
__device__ inline void finish_byte_transpose(uint32_t first_rows, uint32_t last_rows, uint32_t &low, uint32_t &high) {
    const int lane = laneid(), g = lane / 4, t = lane % 4;
    const bool odd = g & 1;
    const uint32_t first_column = g < 4 ? 0x6420 : 0x7531,
                   second_column = g < 4 ? 0x7531 : 0x6420;   // even, odd or odd, even
    const int from_low = 4 * (g / 2) + t, from_high = from_low + 16;
    const uint32_t first =
        shfl_sync_idx_b32(__byte_perm(first_rows, last_rows, first_column), odd ? from_high : from_low);
    const uint32_t second =
        shfl_sync_idx_b32(__byte_perm(first_rows, last_rows, second_column), odd ? from_low : from_high);
    low = odd ? second : first;
    high = odd ? first : second;
}

// Four 4-bit elements of a row, 4 t on, one to a byte, from the 8 bytes of 16 elements that lanes t = 0, 1 of the quad
// hold.
__device__ inline uint32_t unpack_4bit_row(uint32_t packed) {
    const int lane = laneid();
    const uint32_t word = shfl_sync_idx_b32(packed, (lane & ~3) | (lane >> 1 & 1));
    const uint32_t bytes = __byte_perm(word, 0, lane & 1 ? 0x4342 : 0x4140);   // two, each in the lower half of 16 bits
    return (bytes | bytes << 4) & 0x0f0f0f0fu;
}

// A register of 16x8 bytes as accumulators lie, to columns of 16 bytes. Two lanes whose rows are neighbours exchange a
// column each, so that a lane has two bytes in a row to store.
template <int count>
__device__ inline void stmatrix_m16n8_trans_b8(uint32_t column_address, const uint32_t (&registers)[count]) {
    const int lane = laneid(), g = lane / 4, t = lane % 4;
    const bool odd = g & 1;
#pragma unroll
    for (int i = 0; i < count; ++i) {
        const uint32_t other = shfl_sync_bfly_b32(registers[i], 4);
        // Even g: column 2 t of rows g, g + 1 and g + 8, g + 9. Odd g: column 2 t + 1 of rows g - 1, g and g + 7, g
        // + 8.
        const uint32_t bytes =
            odd ? __byte_perm(other, registers[i], 0x7351) : __byte_perm(registers[i], other, 0x6240);
        const uint32_t address = shfl_sync_idx_b32(column_address, 8 * i + 2 * t + odd) + (g & ~1);
        asm volatile("st.shared.b16 [%0], %1;" ::"r"(address), "h"(static_cast<uint16_t>(bytes)) : "memory");
        asm volatile("st.shared.b16 [%0], %1;" ::"r"(address + 8), "h"(static_cast<uint16_t>(bytes >> 16)) : "memory");
    }
}

}   // namespace ptx::portable
