// D = A B + C of one matrix instruction whose registers are given bit by bit. This code assumes no layout, format or
// rounding.
#pragma once

#include <cstdint>
#include <tuple>

#include "probe.cuh"

namespace op {

// The registers of all trials: those of lane l of trial t begin at (32 t + l) times their number per lane. `c` and `d`
// of an f16 accumulator take the first two of four.
struct TrialRegisters {
    const uint32_t *a, *b, *c;   // [trials, 32, 4], [trials, 32, 2], [trials, 32, 4]
    const uint32_t *scales;      // [trials, 32, 2]: of A, of B
    uint32_t *d;                 // [trials, 32, 4]
};

// An instruction of probe.cuh that adds in f32.
template <class Instruction>
struct OnF32 {
    __device__ static void multiply(uint32_t (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                    const uint32_t (&scales)[2]) {
        float sums[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i] = __uint_as_float(c[i]);
        Instruction::template multiply<0, 0, 0, 0>(sums, a, b, scales[0], scales[1]);
#pragma unroll
        for (int i = 0; i < 4; ++i) c[i] = __float_as_uint(sums[i]);
    }
};

template <bool is_signed>
struct OnS32 {
    __device__ static void multiply(uint32_t (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                    const uint32_t (&)[2]) {
        int sums[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i] = c[i];
        ptx::mma_m16n8k32_bytes<is_signed>(sums, a, b);
#pragma unroll
        for (int i = 0; i < 4; ++i) c[i] = sums[i];
    }
};

// Calls multiply(halves) with the two registers of an f16 accumulator.
template <class Multiply>
__device__ inline void on_halves(uint32_t (&c)[4], Multiply &&multiply) {
    uint32_t halves[2] = {c[0], c[1]};
    multiply(halves);
    c[0] = halves[0], c[1] = halves[1];
}

struct F16OnF16 {
    __device__ static void multiply(uint32_t (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                    const uint32_t (&)[2]) {
        on_halves(c, [&](uint32_t (&halves)[2]) { ptx::mma_m16n8k16_f16_f16(halves, a, b); });
    }
};

template <class Format, bool has_kind>
struct ContainersOnF16 {
    __device__ static void multiply(uint32_t (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                    const uint32_t (&)[2]) {
        on_halves(c, [&](uint32_t (&halves)[2]) { Unscaled<Format, Format, has_kind, true>::into(halves, a, b); });
    }
};

template <class Format>
using OfKind = OnF32<Unscaled<Format, Format, true, false>>;
template <class Format>
using OfKindOnF16 = ContainersOnF16<Format, true>;
template <class Format>
using OfScaledKind = OnF32<Mxf8f6f4<Format, Format>>;

// By number, as ptxrt/ops/probes.py lists them: A and B of one format.
using GivenForms =
    std::tuple<OnF32<Bf16>, OnF32<F16>, F16OnF16, OnF32<Tf32>, OnS32<true>, OnS32<false>,
               OnF32<Unscaled<ptx::E4m3, ptx::E4m3, false, false>>, OnF32<Unscaled<ptx::E5m2, ptx::E5m2, false, false>>,
               ContainersOnF16<ptx::E4m3, false>, ContainersOnF16<ptx::E5m2, false>,                                 //
               OfKind<ptx::E4m3>, OfKind<ptx::E5m2>, OfKind<ptx::E2m1>, OfKind<ptx::E3m2>, OfKind<ptx::E2m3>,        //
               OfKindOnF16<ptx::E4m3>, OfKindOnF16<ptx::E5m2>, OfKindOnF16<ptx::E2m1>, OfKindOnF16<ptx::E3m2>,       //
               OfKindOnF16<ptx::E2m3>,                                                                               //
               OfScaledKind<ptx::E4m3>, OfScaledKind<ptx::E5m2>, OfScaledKind<ptx::E2m1>, OfScaledKind<ptx::E3m2>,   //
               OfScaledKind<ptx::E2m3>, OnF32<Mxf4>, OnF32<Mxf4nvf4>, OnF32<Mxf4nvf4With2>>;

constexpr int given_forms = std::tuple_size_v<GivenForms>;

// One trial, by one warp.
__device__ inline void probe_registers(const TrialRegisters &registers, int form, int trial) {
    const int place = 32 * trial + ptx::laneid();
    uint32_t a[4], b[2], c[4], scales[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = registers.a[4 * place + i], c[i] = registers.c[4 * place + i];
#pragma unroll
    for (int i = 0; i < 2; ++i) b[i] = registers.b[2 * place + i], scales[i] = registers.scales[2 * place + i];
    static_for<given_forms>([&](auto each) {
        if (form == each) std::tuple_element_t<each, GivenForms>::multiply(c, a, b, scales);
    });
#pragma unroll
    for (int i = 0; i < 4; ++i) registers.d[4 * place + i] = c[i];
}

}   // namespace op
