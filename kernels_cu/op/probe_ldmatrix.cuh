// Finds, with numbered bytes, where ldmatrix puts the bytes of shared memory in registers, and where stmatrix puts
// those of registers in shared memory.
#pragma once

#include <cstdint>

#include "../kernel.cuh"
#include "../ptx/ldmatrix.cuh"
#include "../ptx/warp.cuh"

namespace op {

// Row i of the matrices; lane i gives its address.
struct MatrixRows {
    uint32_t words[32][4];

    __device__ uint32_t address(int row) const { return static_cast<uint32_t>(__cvta_generic_to_shared(words[row])); }
};

// A word of elements of `bits` bits. Element i contains the bits from `bits` pass on of its number, first + i.
template <int bits>
__device__ inline uint32_t numbered_word(int first, int pass) {
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < 32 / bits; ++i) word |= ((first + i) >> (bits * pass) & ((1 << bits) - 1)) << (bits * i);
    return word;
}

constexpr int passes_for(int bits) { return bits == 8 ? 2 : 3; }   // 512 bytes have 9 bits of number, 1024 nibbles 10

// places[lane][register][byte] = the number of the element that load(registers, row address) puts in that byte.
// Elements of memory are numbered by row, in a row from the lowest bits of its first byte on.
template <int bits, class Load>
__device__ inline void probe_load(MatrixRows &rows, int *places, Load &&load) {
    const int lane = ptx::laneid();
    int found[4][4] = {};
#pragma unroll
    for (int pass = 0; pass < passes_for(bits); ++pass) {
        ptx::bar_warp_sync();   // all lanes have loaded the old contents
#pragma unroll
        for (int i = 0; i < 4; ++i) rows.words[lane][i] = numbered_word<bits>((4 * lane + i) * (32 / bits), pass);
        ptx::bar_warp_sync();   // all rows are written
        uint32_t registers[4];
        load(registers, rows.address(lane));
#pragma unroll
        for (int i = 0; i < 16; ++i) found[i / 4][i % 4] |= (registers[i / 4] >> (8 * (i % 4)) & 0xff) << (bits * pass);
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) places[16 * lane + i] = found[i / 4][i % 4];
}

// stored[row][byte] = the number of the byte of a register that store(row address, registers) puts there. Bytes are
// numbered by lane, register and byte.
template <class Store>
__device__ inline void probe_store(MatrixRows &rows, int *stored, Store &&store) {
    const int lane = ptx::laneid();
    int found[16] = {};
#pragma unroll
    for (int pass = 0; pass < passes_for(8); ++pass) {
        uint32_t registers[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) registers[i] = numbered_word<8>(16 * lane + 4 * i, pass);
        ptx::bar_warp_sync();   // all lanes have read the old contents
        store(rows.address(lane), registers);
        ptx::bar_warp_sync();   // all rows are stored
#pragma unroll
        for (int i = 0; i < 16; ++i) found[i] |= (rows.words[lane][i / 4] >> (8 * (i % 4)) & 0xff) << (8 * pass);
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) stored[16 * lane + i] = found[i];
}

// Where the findings of each form go, 512 numbers each.
struct MatrixFindings {
    int *m8n8, *m8n8_trans, *m16n16_trans_b8, *m8n16_b4x16_p64, *stored_m8n8, *stored_m8n8_trans,
        *stored_m16n8_trans_b8;
};

// All forms, by one warp.
__device__ inline void probe_ldmatrix(MatrixRows &rows, const MatrixFindings &findings) {
    probe_load<8>(rows, findings.m8n8, ptx::ldmatrix_x4);
    probe_load<8>(rows, findings.m8n8_trans, ptx::ldmatrix_x4_trans);
    probe_load<8>(rows, findings.m16n16_trans_b8, ptx::ldmatrix_m16n16_x2_trans_b8);
    probe_load<4>(rows, findings.m8n16_b4x16_p64, ptx::ldmatrix_m8n16_x4_b8x16_b4x16_p64);
    probe_store(rows, findings.stored_m8n8, ptx::stmatrix_x4);
    probe_store(rows, findings.stored_m8n8_trans, ptx::stmatrix_x4_trans);
    probe_store(rows, findings.stored_m16n8_trans_b8, ptx::stmatrix_m16n8_x4_trans_b8);
}

}   // namespace op
