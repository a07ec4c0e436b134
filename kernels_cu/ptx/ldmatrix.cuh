// ldmatrix, stmatrix, movmatrix: matrices between shared memory and the fragments of a warp.
//
// Lane i gives the address, 16-byte aligned, of the i-th row of all matrices one after another; where there are fewer
// than 32 rows, the other lanes' addresses are not read. A row is 16 bytes. Called by all 32 lanes. Source: PTX
// ISA 9.0, 9.7.14.5.15 to 9.7.14.5.17.
#pragma once

#include <cstdint>

#include "portable/ldmatrix.cuh"
#include "target.cuh"

namespace ptx {

// ---------------------------------------------------------------------------------------------------------------------
// 8x8 matrices of 16-bit elements: register i of lane l has bytes 4 (l % 4) .. + 3 of row l / 4 of matrix i.
// Transposed: elements l / 4 of rows 2 (l % 4) and 2 (l % 4) + 1.

__device__ inline void ldmatrix_x1(uint32_t &matrix, uint32_t row_address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(matrix) : "r"(row_address) : "memory");
}

__device__ inline void ldmatrix_x2(uint32_t (&registers)[2], uint32_t row_address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(registers[0]), "=r"(registers[1])
                 : "r"(row_address)
                 : "memory");
}

__device__ inline void ldmatrix_x4(uint32_t (&registers)[4], uint32_t row_address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
                 : "r"(row_address)
                 : "memory");
}

__device__ inline void ldmatrix_x1_trans(uint32_t &matrix, uint32_t row_address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
                 : "=r"(matrix)
                 : "r"(row_address)
                 : "memory");
}

__device__ inline void ldmatrix_x2_trans(uint32_t (&registers)[2], uint32_t row_address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(registers[0]), "=r"(registers[1])
                 : "r"(row_address)
                 : "memory");
}

__device__ inline void ldmatrix_x4_trans(uint32_t (&registers)[4], uint32_t row_address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
                 : "r"(row_address)
                 : "memory");
}

// A matrix in registers, as ldmatrix_x1 leaves it, transposed.
__device__ inline uint32_t movmatrix_trans(uint32_t matrix) {
    uint32_t transposed;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(matrix));
    return transposed;
}

// The opposite of ldmatrix: register i of all lanes becomes the rows of matrix i.
__device__ inline void stmatrix_x1(uint32_t row_address, uint32_t matrix) {
    if constexpr (has_stmatrix) {
        asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};" ::"r"(row_address), "r"(matrix) : "memory");
    } else {
        const uint32_t registers[1] = {matrix};
        portable::stmatrix(row_address, registers);
    }
}

__device__ inline void stmatrix_x2(uint32_t row_address, const uint32_t (&registers)[2]) {
    if constexpr (has_stmatrix) {
        asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(row_address), "r"(registers[0]),
                     "r"(registers[1])
                     : "memory");
    } else {
        portable::stmatrix(row_address, registers);
    }
}

__device__ inline void stmatrix_x4(uint32_t row_address, const uint32_t (&registers)[4]) {
    if constexpr (has_stmatrix) {
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address),
                     "r"(registers[0]), "r"(registers[1]), "r"(registers[2]), "r"(registers[3])
                     : "memory");
    } else {
        portable::stmatrix(row_address, registers);
    }
}

__device__ inline void stmatrix_x2_trans(uint32_t row_address, const uint32_t (&registers)[2]) {
    if constexpr (has_stmatrix) {
        asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(row_address),
                     "r"(registers[0]), "r"(registers[1])
                     : "memory");
    } else {
        const uint32_t transposed[2] = {movmatrix_trans(registers[0]), movmatrix_trans(registers[1])};
        portable::stmatrix(row_address, transposed);
    }
}

__device__ inline void stmatrix_x4_trans(uint32_t row_address, const uint32_t (&registers)[4]) {
    if constexpr (has_stmatrix) {
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address),
                     "r"(registers[0]), "r"(registers[1]), "r"(registers[2]), "r"(registers[3])
                     : "memory");
    } else {
        const uint32_t transposed[4] = {movmatrix_trans(registers[0]), movmatrix_trans(registers[1]),
                                        movmatrix_trans(registers[2]), movmatrix_trans(registers[3])};
        portable::stmatrix(row_address, transposed);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Bytes

// 16x16 matrices of bytes, transposed: registers 2 i and 2 i + 1 of lane l have column l / 4 and column l / 4 + 8 of
// matrix i, of each rows 4 (l % 4) .. + 3. A tile stored one row per k becomes B of an 8-bit MMA so: with rows k and k
// + 16 in the two matrices, registers 0 and 2 are B of columns 0..7, registers 1 and 3 of columns 8..15.
__device__ inline void ldmatrix_m16n16_x1_trans_b8(uint32_t (&registers)[2], uint32_t row_address) {
    if constexpr (has_byte_matrices) {
        asm volatile("ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%0, %1}, [%2];"
                     : "=r"(registers[0]), "=r"(registers[1])
                     : "r"(row_address)
                     : "memory");
    } else {
        const uint32_t address = portable::address_for_byte_transpose(row_address);
        uint32_t halves[2];
        ldmatrix_x2_trans(halves, address);
        portable::finish_byte_transpose(halves[0], halves[1], registers[0], registers[1]);
    }
}

__device__ inline void ldmatrix_m16n16_x2_trans_b8(uint32_t (&registers)[4], uint32_t row_address) {
    if constexpr (has_byte_matrices) {
        asm volatile("ldmatrix.sync.aligned.m16n16.x2.trans.shared.b8 {%0, %1, %2, %3}, [%4];"
                     : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
                     : "r"(row_address)
                     : "memory");
    } else {
        const uint32_t address = portable::address_for_byte_transpose(row_address);
        uint32_t halves[4];
        ldmatrix_x4_trans(halves, address);
        portable::finish_byte_transpose(halves[0], halves[1], registers[0], registers[1]);
        portable::finish_byte_transpose(halves[2], halves[3], registers[2], registers[3]);
    }
}

// Four 8x16 matrices of 4-bit elements, a row being 8 bytes of them and 8 bytes of padding: register i of lane l has
// elements 4 (l % 4) .. + 3 of row l / 4 of matrix i, one to a byte, in bits 3..0. (kind::mxf8f6f4 takes e2m1 from bits
// 5..2: shift by 2.)
__device__ inline void ldmatrix_m8n16_x4_b8x16_b4x16_p64(uint32_t (&registers)[4], uint32_t row_address) {
    if constexpr (has_byte_matrices) {
        asm volatile("ldmatrix.sync.aligned.m8n16.x4.shared.b8x16.b4x16_p64 {%0, %1, %2, %3}, [%4];"
                     : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
                     : "r"(row_address)
                     : "memory");
    } else {
        uint32_t packed[4];
        ldmatrix_x4(packed, row_address);
#pragma unroll
        for (int i = 0; i < 4; ++i) registers[i] = portable::unpack_4bit_row(packed[i]);
    }
}

// The opposite of the transposed load of bytes, for accumulators: byte e of a register of lane l, element (row l / 4 +
// 8 (e / 2), column 2 (l % 4) + e % 2) of a 16x8 matrix, becomes byte `row` of the 16 bytes at the column's address.
// Lanes 8 i .. 8 i + 7 give the addresses of the columns of matrix i.
__device__ inline void stmatrix_m16n8_x1_trans_b8(uint32_t column_address, uint32_t matrix) {
    if constexpr (has_byte_matrices) {
        asm volatile("stmatrix.sync.aligned.m16n8.x1.trans.shared.b8 [%0], {%1};" ::"r"(column_address), "r"(matrix)
                     : "memory");
    } else {
        const uint32_t registers[1] = {matrix};
        portable::stmatrix_m16n8_trans_b8(column_address, registers);
    }
}

__device__ inline void stmatrix_m16n8_x2_trans_b8(uint32_t column_address, const uint32_t (&registers)[2]) {
    if constexpr (has_byte_matrices) {
        asm volatile("stmatrix.sync.aligned.m16n8.x2.trans.shared.b8 [%0], {%1, %2};" ::"r"(column_address),
                     "r"(registers[0]), "r"(registers[1])
                     : "memory");
    } else {
        portable::stmatrix_m16n8_trans_b8(column_address, registers);
    }
}

__device__ inline void stmatrix_m16n8_x4_trans_b8(uint32_t column_address, const uint32_t (&registers)[4]) {
    if constexpr (has_byte_matrices) {
        asm volatile("stmatrix.sync.aligned.m16n8.x4.trans.shared.b8 [%0], {%1, %2, %3, %4};" ::"r"(column_address),
                     "r"(registers[0]), "r"(registers[1]), "r"(registers[2]), "r"(registers[3])
                     : "memory");
    } else {
        portable::stmatrix_m16n8_trans_b8(column_address, registers);
    }
}

}   // namespace ptx
