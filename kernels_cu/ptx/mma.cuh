// mma.sync: one matrix multiply-accumulate per function, a whole warp at a time.
//
// Fragments (PTX ISA 9.0, 9.7.14.5), for lane = 4 g + t, register r, element e of a register (lowest bits first), with
// w elements in a register and K the depth of the instruction:
//   A[r][e]: row g + 8 (r & 1),  k = w t + e + (K / 2) (r >> 1)      r = 0..3
//   B[r][e]: column g,           k = w t + e + (K / 2) r             r = 0..1
//   C[i]   : row g + 8 (i >> 1), column 2 t + (i & 1)                i = 0..3
//
// Block scales (9.7.14.3) stand in one register per operand, of which the selectors {byte, thread} name a part:
//   A's row m     lane 4 (m % 8) + 2 thread + m / 8      thread 0, 1
//   B's column n  lane 4 n + thread                      thread 0..3
// and of that lane the bytes from `byte` on, one for each block of k in order. No other lane, no other byte is read.
//
// A block-scaled A that is multiplied by several B is prepared once: `prepare_..._a` returns the argument of the
// overload without `scale_a`. For the instruction these are the unchanged registers; stand-ins convert A there.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cvt.cuh"
#include "portable/mma.cuh"
#include "target.cuh"

namespace ptx {

// c += A B with A 16x16 and B 16x8 in bf16 and c 16x8 in f32. Called by all 32 lanes.
__device__ inline void mma_m16n8k16_bf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    portable::mma_m16n8k16_bf16(c, a, b);   // sm_80 and newer, the same everywhere
}

// The same in f16.
__device__ inline void mma_m16n8k16_f16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    portable::mma_m16n8k16_f16(c, a, b);
}

// A for the instruction: its registers, and the register with its scales.
struct RegistersA {
    uint32_t codes[4];
    uint32_t scales;
};

template <int thread_a, int thread_b>
constexpr void check_scale_threads() {
    static_assert(0 <= thread_a && thread_a <= 1,
                  "thread_a is 0 or 1: A's scales stand in one of the two lane pairs of a quad");
    static_assert(0 <= thread_b && thread_b <= 3, "thread_b is 0, 1, 2 or 3: B's scales stand in one lane of a quad");
}

// ---------------------------------------------------------------------------------------------------------------------
// kind::mxf8f6f4: 8-bit containers, one ue8m0 scale for all 32 k of a row or column

template <class Format>
constexpr bool fits_container =
    std::is_same_v<Format, E4m3> || std::is_same_v<Format, E5m2> || std::is_same_v<Format, E3m2> ||
    std::is_same_v<Format, E2m3> || std::is_same_v<Format, E2m1>;

using Mxf8f6f4A = std::conditional_t<has_block_scaled_mma, RegistersA, portable::OperandA<1>>;

// A 16x32 prepared for mma_m16n8k32_mxf8f6f4 with the same FormatA, byte_a and thread_a. Called by all 32 lanes.
template <class FormatA, int byte_a, int thread_a>
__device__ inline auto prepare_mxf8f6f4_a(const uint32_t (&a)[4], uint32_t scale_a) {
    if constexpr (has_block_scaled_mma) return RegistersA{{a[0], a[1], a[2], a[3]}, scale_a};
    else return portable::OperandA<1>::contained<FormatA, byte_a, thread_a>(a, scale_a);
}

// c += (A scaled by rows) (B scaled by columns) with A 16x32, B 32x8 and c 16x8 in f32. Called by all 32 lanes.
//   a, b     one element per byte: e4m3 and e5m2 in all of it, e3m2 and e2m3 in bits 5..0, e2m1 in bits 5..2, others 0
//   scale_a  ue8m0: byte byte_a of the lanes of thread_a;  scale_b  likewise
// Source: PTX ISA 9.0, 9.7.14.3 (block scaling) and 9.7.14.5.
template <class FormatA, class FormatB, int byte_a, int thread_a, int byte_b, int thread_b, class PreparedA>
__device__ inline void mma_m16n8k32_mxf8f6f4(float (&c)[4], const PreparedA &a, const uint32_t (&b)[2],
                                             uint32_t scale_b) {
    static_assert(fits_container<FormatA> && fits_container<FormatB>,
                  "kind::mxf8f6f4 multiplies e4m3, e5m2, e3m2, e2m3 and e2m1");
    static_assert(0 <= byte_a && byte_a <= 3 && 0 <= byte_b && byte_b <= 3,
                  "scale_vec::1X reads one byte: name byte 0, 1, 2 or 3");
    check_scale_threads<thread_a, thread_b>();
    static_assert(std::is_same_v<PreparedA, Mxf8f6f4A>, "without scale_a, a is what prepare_mxf8f6f4_a returns");
    if constexpr (has_block_scaled_mma) {
        asm("mma.sync.aligned.kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32.row.col.f32.%16.%17.f32.ue8m0 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, %10, {%12, %13}, %11, {%14, %15};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a.codes[0]), "r"(a.codes[1]), "r"(a.codes[2]), "r"(a.codes[3]), "r"(b[0]), "r"(b[1]), "r"(a.scales),
              "r"(scale_b), "n"(byte_a), "n"(thread_a), "n"(byte_b), "n"(thread_b), "C"(FormatA::name),
              "C"(FormatB::name));
    } else {
        portable::mma_m16n8k32_mxf8f6f4<FormatB, byte_b, thread_b>(c, a, b, scale_b);
    }
}

template <class FormatA, class FormatB, int byte_a, int thread_a, int byte_b, int thread_b>
__device__ inline void mma_m16n8k32_mxf8f6f4(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                             uint32_t scale_a, uint32_t scale_b) {
    const auto ready = prepare_mxf8f6f4_a<FormatA, byte_a, thread_a>(a, scale_a);
    mma_m16n8k32_mxf8f6f4<FormatA, FormatB, byte_a, thread_a, byte_b, thread_b>(c, ready, b, scale_b);
}

// ---------------------------------------------------------------------------------------------------------------------
// kind::mxf4: packed e2m1, one ue8m0 scale for each 32 k

using Mxf4A = std::conditional_t<has_block_scaled_mma, RegistersA, portable::OperandA<2>>;

// A 16x64 prepared for mma_m16n8k64_mxf4 with the same byte_a and thread_a. Called by all 32 lanes.
template <int byte_a, int thread_a>
__device__ inline auto prepare_mxf4_a(const uint32_t (&a)[4], uint32_t scale_a) {
    if constexpr (has_block_scaled_mma) return RegistersA{{a[0], a[1], a[2], a[3]}, scale_a};
    else return portable::OperandA<2>::packed<byte_a, thread_a>(a, scale_a);
}

// c += (A scaled by rows) (B scaled by columns) with A 16x64 and B 64x8 in e2m1 and c 16x8 in f32. Called by all 32
// lanes.
//   a, b     eight elements per register, the lower k in the lower nibble
//   scale_a  ue8m0 in the lanes of thread_a: byte byte_a for k 0..31, the next for k 32..63;  scale_b  likewise
// Source: PTX ISA 9.0, 9.7.14.3 and 9.7.14.5.
template <int byte_a, int thread_a, int byte_b, int thread_b, class PreparedA>
__device__ inline void mma_m16n8k64_mxf4(float (&c)[4], const PreparedA &a, const uint32_t (&b)[2], uint32_t scale_b) {
    static_assert((byte_a == 0 || byte_a == 2) && (byte_b == 0 || byte_b == 2),
                  "scale_vec::2X reads bytes 0 and 1, or 2 and 3: name byte 0 or 2");
    check_scale_threads<thread_a, thread_b>();
    static_assert(std::is_same_v<PreparedA, Mxf4A>, "without scale_a, a is what prepare_mxf4_a returns");
    if constexpr (has_block_scaled_mma) {
        asm("mma.sync.aligned.kind::mxf4.block_scale.scale_vec::2X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue8m0 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, %10, {%12, %13}, %11, {%14, %15};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a.codes[0]), "r"(a.codes[1]), "r"(a.codes[2]), "r"(a.codes[3]), "r"(b[0]), "r"(b[1]), "r"(a.scales),
              "r"(scale_b), "n"(byte_a), "n"(thread_a), "n"(byte_b), "n"(thread_b));
    } else {
        portable::mma_m16n8k64_mxf4<byte_b, thread_b>(c, a, b, scale_b);
    }
}

template <int byte_a, int thread_a, int byte_b, int thread_b>
__device__ inline void mma_m16n8k64_mxf4(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                         uint32_t scale_a, uint32_t scale_b) {
    mma_m16n8k64_mxf4<byte_a, thread_a, byte_b, thread_b>(c, prepare_mxf4_a<byte_a, thread_a>(a, scale_a), b, scale_b);
}

// ---------------------------------------------------------------------------------------------------------------------
// kind::mxf4nvf4: packed e2m1, one ue4m3 scale for each 16 k

using Mxf4nvf4A = std::conditional_t<has_block_scaled_mma, RegistersA, portable::ScaledA>;

// A 16x64 prepared for mma_m16n8k64_mxf4nvf4 with the same thread_a. Called by all 32 lanes.
template <int thread_a>
__device__ inline auto prepare_mxf4nvf4_a(const uint32_t (&a)[4], uint32_t scale_a) {
    if constexpr (has_block_scaled_mma) return RegistersA{{a[0], a[1], a[2], a[3]}, scale_a};
    else return portable::ScaledA::packed<thread_a>(a, scale_a);
}

// c += (A scaled by rows) (B scaled by columns) with A 16x64 and B 64x8 in e2m1 and c 16x8 in f32. Called by all 32
// lanes.
//   a, b     eight elements per register, the lower k in the lower nibble
//   scale_a  ue4m3 in the lanes of thread_a: byte i for k 16 i .. 16 i + 15, bit 7 is ignored;  scale_b  likewise
// Source: PTX ISA 9.0, 9.7.14.3 and 9.7.14.5.
template <int thread_a, int thread_b, class PreparedA>
__device__ inline void mma_m16n8k64_mxf4nvf4(float (&c)[4], const PreparedA &a, const uint32_t (&b)[2],
                                             uint32_t scale_b) {
    check_scale_threads<thread_a, thread_b>();
    static_assert(std::is_same_v<PreparedA, Mxf4nvf4A>, "without scale_a, a is what prepare_mxf4nvf4_a returns");
    if constexpr (has_block_scaled_mma) {
        asm("mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, %10, {0, %12}, %11, {0, %13};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a.codes[0]), "r"(a.codes[1]), "r"(a.codes[2]), "r"(a.codes[3]), "r"(b[0]), "r"(b[1]), "r"(a.scales),
              "r"(scale_b), "n"(thread_a), "n"(thread_b));
    } else {
        portable::mma_m16n8k64_mxf4nvf4<thread_b>(c, a, b, scale_b);
    }
}

template <int thread_a, int thread_b>
__device__ inline void mma_m16n8k64_mxf4nvf4(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                             uint32_t scale_a, uint32_t scale_b) {
    mma_m16n8k64_mxf4nvf4<thread_a, thread_b>(c, prepare_mxf4nvf4_a<thread_a>(a, scale_a), b, scale_b);
}

}   // namespace ptx
