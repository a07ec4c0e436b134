// ldmatrix: 8x8 matrices of 16-bit elements from shared memory into fragments.
#pragma once

#include <cstdint>

namespace ptx {

// Four matrices. Lanes 8 i .. 8 i + 7 give the addresses of the rows of matrix i: 16 bytes each, 16-byte aligned. Register i
// of lane l receives bytes 4 (l % 4) .. + 3 of row l / 4 of matrix i. Called by all 32 lanes.
// Source: PTX ISA 9.0, 9.7.14.5.15.
__device__ inline void ldmatrix_x4(uint32_t (&registers)[4], uint32_t row_address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
                 : "r"(row_address)
                 : "memory");
}

// The same with each matrix transposed: register i of lane l receives elements l / 4 of rows 2 (l % 4) and 2 (l % 4) + 1.
__device__ inline void ldmatrix_x4_trans(uint32_t (&registers)[4], uint32_t row_address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
                 : "r"(row_address)
                 : "memory");
}

}  // namespace ptx
