// Products of few rows: the positions of a lane, its share of a row of A and its chunks of lines of B; and the values
// of its runs in 16 bits.
#pragma once

#include <cstdint>

#include "../ptx/alu.cuh"
#include "../ptx/cvt.cuh"
#include "../ptx/warp.cuh"
#include "expanded.cuh"

namespace tile {

// A row is read in steps of 4 * values. Lane 4 g + t has values values * t .. values * (t + 1) - 1 of row g.
template <int values>
struct StepShare {
    __device__ static int row() { return ptx::laneid() / 4; }
    __device__ static int quarter() { return ptx::laneid() % 4; }
    __device__ static int first() { return quarter() * values; }
};

// Lines of 128 bytes in shared memory, a row to a line. Chunk c of 16 bytes of row r lies at c ^ swizzle(r), so that
// neither access has bank conflicts: 8 lanes copy a line; 2, 4 or 8 rows of 4 lanes, `bytes` each, are read at once.
template <int bytes>
struct SwizzledLines {
    static constexpr int line = 128;

    __device__ static int swizzle(int row) { return row * (bytes / 4) % 8; }

    int row, chunk;   // that this lane copies, of 4 rows
    int target;       // offset of that chunk
    int from;         // offset where this lane reads the first step of 8 rows

    __device__ SwizzledLines() {
        const int lane = ptx::laneid();
        row = lane / 8, chunk = lane % 8;
        target = line * row + 16 * (chunk ^ swizzle(row));
        from = line * (lane / 4) + (bytes * (lane % 4) ^ 16 * swizzle(lane / 4));
    }
};

// The order of the values of a run in pairs, for lanes that hold a run of A and of B each. An order is valid if the
// first two pairs hold the first four of eight values, because these are the k of one MMA. natural: (0, 1), (2, 3), (4,
// 5), (6, 7). crossed: (0, 2), (1, 3), (4, 6), (5, 7), the cheapest order for e2m1 in bf16.
enum class PairOrder { natural, crossed };

// Eight e2m1 codes as four bf16x2 in crossed order, times 2^-126. One multiplication moves the sign of a code to bit 15
// of its half and the other bits to bits 8..6. Exact.
//
// Integer instructions are the bottleneck: they run at half the rate of multiplications. Therefore a multiplication
// also subtracts the lower of two codes; the compiler would mask it away.
__device__ inline void crossed_bf16x2_from_e2m1x8(uint32_t codes, uint32_t (&values)[4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32_t two = __byte_perm(codes, 0, i == 0 ? 0x4140 : 0x4342), lower = two & 0x000f000fu;
        const uint32_t upper = ptx::mad_lo_s32<-0x104>(lower, two * 0x0104u);
        values[2 * i] = lower * 0x1040u & 0x81c081c0u;
        values[2 * i + 1] = upper & 0x81c081c0u;
    }
}

// The ue8m0 scales in bytes 0 and 1 as bf16x2: 2^(scale - 127), subnormal for 0, NaN for 255. Without the conversion of
// the hardware, one sum has bit 15 of a half set if the scale is 255, the other unless it is 0: both need bit 6.
__device__ inline uint32_t bf16x2_from_ue8m0x2(uint32_t bytes) {
    if constexpr (ptx::has_narrow_conversions) {
        return ptx::cvt_rn_bf16x2_ue8m0x2(bytes);
    } else {
        const uint32_t exponents = __byte_perm(bytes, 0, 0x4140) << 7;
        const uint32_t special = ((exponents + 0x00800080u) | ~(exponents + 0x7f807f80u)) & 0x80008000u;
        return exponents | special >> 9;
    }
}

// Runs of eight values for products of few rows, in MMAs of `Element`. factors() converts the scales in bytes 0 and 1
// of a word, whose others are 0, to a pair, eight() the codes of eight values, which begin at `first`, times a pair of
// equal factors. Sums of their products times `lift` are true sums.
struct RunsToBf16 {
    static constexpr float lift = 1.0f;

    __device__ static uint32_t factors(uint32_t bytes) { return bf16x2_from_ue8m0x2(bytes); }

    template <class Format, PairOrder order>
    __device__ static void eight(uint32_t (&pairs)[4], const uint32_t *first, uint32_t factor) {
        if constexpr (Format::bits == 4) {
            static_assert(order == PairOrder::crossed);
            crossed_bf16x2_from_e2m1x8(first[0], pairs);
#pragma unroll
            for (uint32_t &pair : pairs) pair = ptx::mul_bf16x2(ptx::mul_bf16x2(pair, 0x7e807e80u), factor);   // 2^126
        } else {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                uint32_t values[2];
                ptx::cvt_rn_f16x2_e4m3x4(values,
                                         order == PairOrder::crossed ? __byte_perm(first[i], 0, 0x3120) : first[i]);
                pairs[2 * i] = ptx::mul_bf16x2(ExpandedMx::value(values[0]), factor);
                pairs[2 * i + 1] = ptx::mul_bf16x2(ExpandedMx::value(values[1]), factor);
            }
        }
    }
};

// e2m1 times ue4m3 in bf16, times 2^-7: the factor holds the part of 2^126 that bf16 can hold beside a scale of 448.
struct NvRunsToBf16 {
    static constexpr float lift = 0x1p7f;

    __device__ static uint32_t factors(uint32_t bytes) {
        const uint32_t scales =
            ExpandedMx::value(ptx::cvt_rn_f16x2_e4m3x2(bytes));         // of either sign, which is ignored
        return ptx::mul_bf16x2(ptx::abs_bf16x2(scales), 0x7b007b00u);   // 2^119
    }
    template <class Format, PairOrder order>
    __device__ static void eight(uint32_t (&pairs)[4], const uint32_t *first, uint32_t factor) {
        static_assert(Format::bits == 4 && order == PairOrder::crossed);
        crossed_bf16x2_from_e2m1x8(first[0], pairs);
#pragma unroll
        for (uint32_t &pair : pairs) pair = ptx::mul_bf16x2(pair, factor);
    }
};

// Eight e2m1 codes as four f16x2 in crossed order, times 2^-6. Shifted by two bits, the magnitudes of four codes are
// those of e4m3. Exact.
__device__ inline void crossed_f16x2_from_e2m1x8(uint32_t codes, uint32_t (&values)[4]) {
    uint32_t even[2], odd[2];
    ptx::cvt_rn_f16x2_e4m3x4(even, (codes << 4 & 0x80808080u) | (codes << 2 & 0x1c1c1c1cu));
    ptx::cvt_rn_f16x2_e4m3x4(odd, (codes & 0x80808080u) | (codes >> 2 & 0x1c1c1c1cu));
    values[0] = even[0], values[1] = odd[0], values[2] = even[1], values[3] = odd[1];
}

// The factor holds 2^6, which f16 can hold beside a scale of 448.
struct NvRunsToF16 {
    static constexpr float lift = 1.0f;

    __device__ static uint32_t factors(uint32_t bytes) {
        return ptx::portable::mul_f16x2(ptx::cvt_rn_f16x2_ue4m3x2(bytes), 0x54005400u);   // 2^6
    }
    template <class Format, PairOrder order>
    __device__ static void eight(uint32_t (&pairs)[4], const uint32_t *first, uint32_t factor) {
        static_assert(Format::bits == 4 && order == PairOrder::crossed);
        crossed_f16x2_from_e2m1x8(first[0], pairs);
#pragma unroll
        for (uint32_t &pair : pairs) pair = ptx::portable::mul_f16x2(pair, factor);
    }
};

// Scales of one operand under which all values except zeros are normal numbers of f16: bytes `first` to `last`. The
// middle of the range suits usual weights (B) and activations (A). The value of a block with scale `first` is 2^lowest
// times its codes.
template <class Format, bool of_b>
struct HalfScales {
    static constexpr bool wide = Format::bits == 4;   // 2^-1 to 6; else 2^-9 to 448
    static constexpr int first = wide ? 105 : of_b ? 110 : 113, last = wide ? 127 : first + 12;
    static constexpr int lowest = wide ? -13 : -5, shift = lowest + 127 - first;   // values times 2^shift
    static_assert(last < 128);

    // Of four scales: bit 7 of a byte is set where one is outside, or where the byte below it is above 127.
    __device__ static uint32_t outside(uint32_t scales) {
        return scales | ~(scales + (128 - first) * 0x01010101u) | (scales + (127 - last) * 0x01010101u);
    }
    static constexpr uint32_t bias = uint32_t(lowest + 15 + (wide ? 6 : 0) - first) * 0x04000400u;   // e2m1: times 2^-6
    // The factors of the scales in the two halves of a word, or of one scale twice.
    __device__ static uint32_t factors(uint32_t halves) { return ptx::mad_lo_s32<0x400>(halves, bias); }
    __device__ static uint32_t factor(uint32_t scale) { return ptx::mad_lo_s32<0x04000400>(scale, bias); }
};

// Values times ue8m0 in f16 for such scales: exact, and sums of their products have the bits of sums in bf16, because
// MMAs align products by their exponents. A conversion and a multiplication give two values; bf16 takes five
// instructions.
template <class FormatA, class FormatB>
struct MxRunsToF16 {
    using Element = __half;
    using ScalesOfA = HalfScales<FormatA, false>;
    using ScalesOfB = HalfScales<FormatB, true>;
    static constexpr float lift = 1.0f / (1u << (ScalesOfA::shift + ScalesOfB::shift));

    template <class Format, PairOrder order>
    __device__ static void eight(uint32_t (&pairs)[4], const uint32_t *first, uint32_t factor) {
        if constexpr (Format::bits == 4) {
            static_assert(order == PairOrder::crossed);
            crossed_f16x2_from_e2m1x8(first[0], pairs);
        } else {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                uint32_t values[2];
                ptx::cvt_rn_f16x2_e4m3x4(values,
                                         order == PairOrder::crossed ? __byte_perm(first[i], 0, 0x3120) : first[i]);
                pairs[2 * i] = values[0], pairs[2 * i + 1] = values[1];
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) pairs[i] = ptx::portable::mul_f16x2(pairs[i], factor);
    }
};

}   // namespace tile
