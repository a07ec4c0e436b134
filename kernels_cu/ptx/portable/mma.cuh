// Stand-ins for mma.sync forms that only sm_12x has: fragments converted to f16 and f16 mma.sync (sm_80 and newer).
//
// Every e4m3, e5m2, e3m2, e2m3 and e2m1 value is an f16, and so is every e2m1 value times a ue4m3 scale: all products
// are exact. A ue8m0 scale multiplies the sum of its 32 products in f32. Only the order and the rounding of the sums
// differ from the instruction. A and B share one permutation of k, which changes no sum.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../cvt.cuh"
#include "../warp.cuh"

namespace ptx::portable {

__device__ inline void mma_m16n8k16_bf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ inline void mma_m16n8k16_f16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Two registers of four 8-bit containers each as f16x2, in order.
__device__ inline void f16x2_from(E2m1, uint32_t first, uint32_t second, uint32_t (&to_first)[2],
                                  uint32_t (&to_second)[2]) {
    f16x2_from_e2m1_containers(first, second, to_first, to_second);
}

template <class Format>
__device__ inline void f16x2_from(Format, uint32_t first, uint32_t second, uint32_t (&to_first)[2],
                                  uint32_t (&to_second)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const auto convert = [half](uint32_t containers) {
            const uint32_t pair = containers >> (16 * half) & 0xffffu;
            if constexpr (std::is_same_v<Format, E4m3>) return cvt_rn_f16x2_e4m3x2(pair);
            else if constexpr (std::is_same_v<Format, E5m2>) return f16x2_from_e5m2x2(pair);
            else if constexpr (std::is_same_v<Format, E3m2>) return cvt_rn_f16x2_e3m2x2(pair);
            else return cvt_rn_f16x2_e2m3x2(pair);
        };
        to_first[half] = convert(first);
        to_second[half] = convert(second);
    }
}

// The first of the lanes of this lane's quad.
__device__ inline int first_of_quad() { return laneid() & ~3; }

// ---------------------------------------------------------------------------------------------------------------------
// ue8m0 scales: one for each 32 products

// The value of the ue8m0 scale in byte `byte` of a word: 2^(scale - 127), subnormal for 0, NaN for 255.
__device__ inline float factor_from_ue8m0(uint32_t word, int byte) {
    const uint32_t bits = (byte < 3 ? word << (23 - 8 * byte) : word >> 1) & 0x7f800000u;
    return __uint_as_float((bits + 0x00800000u & 0x7f000000u) == 0 ? bits | 0x00400000u : bits);   // 0 and 255
}

// A in f16, in fragments 16 deep, and the factors of the sums of each 32-deep block, for rows g and g + 8.
template <int blocks>
struct OperandA {
    uint32_t f16[2 * blocks][4];
    float rows[blocks][2];

    // From 8-bit containers.
    template <class Format, int byte, int thread>
    __device__ static OperandA contained(const uint32_t (&a)[4], uint32_t scales) {
        static_assert(blocks == 1, "four registers of containers are 32 deep");
        OperandA operand;
        uint32_t pairs[4][2];
        f16x2_from(Format{}, a[0], a[1], pairs[0], pairs[1]);
        f16x2_from(Format{}, a[2], a[3], pairs[2], pairs[3]);
#pragma unroll
        for (int i = 0; i < 8; ++i) operand.f16[i / 4][i % 4] = pairs[i / 4 * 2 + i % 2][i / 2 % 2];
        operand.template set_scales<byte, thread>(scales);
        return operand;
    }

    // From packed e2m1.
    template <int byte, int thread>
    __device__ static OperandA packed(const uint32_t (&a)[4], uint32_t scales) {
        static_assert(blocks == 2, "four registers of packed e2m1 are 64 deep");
        OperandA operand;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            uint32_t pairs[4];
            f16x2_from_e2m1x8(a[i], pairs);
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) operand.f16[i / 2 * 2 + pair / 2][pair % 2 * 2 + i % 2] = pairs[pair];
        }
        operand.template set_scales<byte, thread>(scales);
        return operand;
    }

    template <int byte, int thread>
    __device__ void set_scales(uint32_t scales) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const uint32_t word = shfl_sync_idx_b32(scales, first_of_quad() + 2 * thread + row);
#pragma unroll
            for (int block = 0; block < blocks; ++block) rows[block][row] = factor_from_ue8m0(word, byte + block);
        }
    }
};

// c += A B for B in f16, one scale a column and block. Called by all 32 lanes. p is a sum of 32 products, exact up to
// the tensor core's own rounding. p times A's scale is exact unless f32 overflows or underflows, which cannot happen
// for scales of A from 2^-117 to 2^91 with e5m2, to 2^105 with e4m3, to 2^117 with e2m1. B's scales may have any value.
template <int byte, int thread, int blocks>
__device__ inline void multiply(float (&c)[4], const OperandA<blocks> &a, const uint32_t (&b)[2 * blocks][2],
                                uint32_t scales) {
    const int lane = 2 * (laneid() & 3) * 4 + thread;   // of column 2 t
    const uint32_t words[2] = {shfl_sync_idx_b32(scales, lane), shfl_sync_idx_b32(scales, lane + 4)};
#pragma unroll
    for (int block = 0; block < blocks; ++block) {
        float p[4] = {};
        mma_m16n8k16_f16(p, a.f16[2 * block], b[2 * block]);
        mma_m16n8k16_f16(p, a.f16[2 * block + 1], b[2 * block + 1]);
        float columns[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) columns[i] = factor_from_ue8m0(words[i], byte + block);
#pragma unroll
        for (int i = 0; i < 4; ++i) c[i] = fmaf(p[i] * a.rows[block][i / 2], columns[i % 2], c[i]);
    }
}

template <class FormatB, int byte_b, int thread_b>
__device__ inline void mma_m16n8k32_mxf8f6f4(float (&c)[4], const OperandA<1> &a, const uint32_t (&b)[2],
                                             uint32_t scale_b) {
    uint32_t pairs[2][2];
    f16x2_from(FormatB{}, b[0], b[1], pairs[0], pairs[1]);
    multiply<byte_b, thread_b>(c, a, pairs, scale_b);
}

template <int byte_b, int thread_b>
__device__ inline void mma_m16n8k64_mxf4(float (&c)[4], const OperandA<2> &a, const uint32_t (&b)[2],
                                         uint32_t scale_b) {
    uint32_t pairs[4][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        uint32_t of_register[4];
        f16x2_from_e2m1x8(b[i], of_register);
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) pairs[2 * i + pair / 2][pair % 2] = of_register[pair];
    }
    multiply<byte_b, thread_b>(c, a, pairs, scale_b);
}

// ---------------------------------------------------------------------------------------------------------------------
// ue4m3 scales: one for each 16 products, taken into the elements

// Eight e2m1 values times their scale as four f16x2, with `scale` in both halves. Exact: 2 significant bits times 4,
// from 2^-10 to 2688.
__device__ inline void scaled_f16x2_from_e2m1x8(uint32_t codes, uint32_t scale, uint32_t (&values)[4]) {
    f16x2_from_e2m1x8(codes, values);
#pragma unroll
    for (uint32_t &pair : values) pair = mul_f16x2(pair, scale);
}

// The scales of this lane's elements of one row or column, each in both halves of an f16x2: of k 8 t .. 8 t + 7, then
// of k 8 t + 32 .. 8 t + 39. `lane` carries the four scales of the row or column.
__device__ inline void element_scales(uint32_t scales, int lane, uint32_t (&of_half)[2]) {
    const uint32_t word = shfl_sync_idx_b32(scales, lane);
    const uint32_t pair = cvt_rn_f16x2_ue4m3x2(__byte_perm(word, 0, laneid() & 2 ? 0x4431 : 0x4420));
    of_half[0] = __byte_perm(pair, 0, 0x1010);
    of_half[1] = __byte_perm(pair, 0, 0x3232);
}

// A times its scales in f16, 16 deep a fragment.
struct ScaledA {
    uint32_t f16[4][4];

    template <int thread>
    __device__ static ScaledA packed(const uint32_t (&a)[4], uint32_t scales) {
        ScaledA operand;
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            uint32_t of_half[2];
            element_scales(scales, first_of_quad() + 2 * thread + row, of_half);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                uint32_t pairs[4];
                scaled_f16x2_from_e2m1x8(a[2 * half + row], of_half[half], pairs);
#pragma unroll
                for (int pair = 0; pair < 4; ++pair) operand.f16[2 * half + pair / 2][pair % 2 * 2 + row] = pairs[pair];
            }
        }
        return operand;
    }
};

template <int thread_b>
__device__ inline void mma_m16n8k64_mxf4nvf4(float (&c)[4], const ScaledA &a, const uint32_t (&b)[2],
                                             uint32_t scale_b) {
    uint32_t of_half[2];
    element_scales(scale_b, first_of_quad() + thread_b, of_half);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        uint32_t pairs[4];
        scaled_f16x2_from_e2m1x8(b[half], of_half[half], pairs);
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            const uint32_t fragment[2] = {pairs[2 * step], pairs[2 * step + 1]};
            mma_m16n8k16_f16(c, a.f16[2 * half + step], fragment);
        }
    }
}

}   // namespace ptx::portable
