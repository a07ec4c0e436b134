// E2m1 codes of 16-bit values divided by any step, two at a time and without a division: values are compared with the
// smallest value of each code.
#pragma once

#include <cstdint>

#include "../ptx/math.cuh"
#include "../ptx/target.cuh"
#include "format.cuh"
#include "scale.cuh"

namespace tile {

// Whether this is faster. A register holds only one float, and with an instruction for e2m1 a division costs less.
template <class Element>
constexpr bool uses_thresholds = sizeof(Element) == 2 && ptx::has_packed_integers && !ptx::has_narrow_conversions;

// The codes of f32(value / step), correctly rounded, for pairs whose halves may have a step each.
//
// The code's magnitude is the number of bounds 0.25, 0.75, 1.25, 1.75, 2.5, 3.5 and 5 that the quotient reaches. Ties
// round to even: the quotient must exceed the first, third, fifth and seventh bound, called odd, and may equal the
// others, called even. A quotient is rounded up to an even bound b from half a unit in the last place below it, and
// down to an odd one from as much above. So the code is reached by values >= (b - half) step for even bounds, and > (b
// + half) step for odd ones. The latter product has at least 25 significant bits, so no value equals it, and >= is the
// same. Such a product, rounded up by one fma and then up to the 16-bit format, is the smallest value with that code.
// Up to powers of two there are four bounds: the odd ones 1 (for 0.25) and 1.25 (for 1.25, 2.5, 5), and the even ones
// 1.5 (for 0.75) and 1.75 (for 1.75, 3.5).
//
// Magnitudes are ordered as integers, and an octave is a constant: one addition counts the bounds that are octaves
// apart, as the octaves of the sum.
template <class Element>
struct E2m1Thresholds {
    static constexpr int octave_bits = is_bf16<Element> ? 7 : 10;
    static constexpr uint32_t octave = 0x00010001u << octave_bits;

    uint32_t first_odd, odd, first_even, even;   // to be added to magnitudes
    uint32_t factor;                             // of f16: see Step

    // A step from 2^-100 (of f16 2^-22) to 2^100, or any where all values are 0; the values are up to `amax`, their
    // quotients below 7. In f16 small values are multiplied by 2^10, since subnormals have no octaves. Only zeros have
    // a step above 2^14, where differences of octaves would exceed the 32 bits of less().
    struct Step {
        float value, factor = 1.0f;

        __device__ Step(float step, float amax) : value(step) {
            if constexpr (!is_bf16<Element>) {
                if (amax < 0x1p-4f) factor = 0x1p10f;
                value = fminf(fmaxf(step, 0x1p-22f) * factor, 0x1p14f);
            }
        }
    };

    __device__ explicit E2m1Thresholds(Step step) : E2m1Thresholds(step, step) {}

    // Of the lower and of the upper halves.
    __device__ E2m1Thresholds(Step low_step, Step high_step) {
        factor = ptx::cvt_rn_f16x2_f32(high_step.factor, low_step.factor);
        const Half low(low_step.value), high(high_step.value);
        first_odd = __byte_perm(low.first_odd, high.first_odd, 0x7632);
        odd = __byte_perm(low.odd, high.odd, 0x7632);
        first_even = __byte_perm(low.first_even, high.first_even, 0x7632);
        even = __byte_perm(low.even, high.even, 0x7632);
    }

    // The code of each value in the upper four bits of its half; the other bits are undefined.
    __device__ uint32_t codes(uint32_t pair) const {
        uint32_t magnitude = magnitudes(pair, Element{});
        if constexpr (!is_bf16<Element>) magnitude = ptx::fma_rn_f16x2(magnitude, factor, 0);
        const uint32_t odds = ptx::max_s16x2(ptx::add_s16x2(magnitude, odd),
                                             ptx::min_relu_s16x2(ptx::add_s16x2(magnitude, first_odd), octave));
        const uint32_t evens = ptx::max_s16x2(ptx::add_s16x2(magnitude, even),
                                              ptx::min_relu_s16x2(ptx::add_s16x2(magnitude, first_even), octave));
        const uint32_t sum = (odds & ~(octave - 0x00010001u)) + evens;
        return ptx::select_bits(0x70007000u, sum << (12 - octave_bits), pair);   // the sign bit is in place already
    }

private:
    struct Half {
        uint32_t first_odd, odd, first_even, even;   // in their upper halves

        __device__ explicit Half(float step) {
            const float half = step * 0x1p-24f;                 // a unit in the last place of 1 to 2
            first_odd = less(3, __fmaf_ru(step, 1.0f, half));   // 1 octave less (1 - 2 octaves)
            odd = less(2, __fmaf_ru(step, 1.25f, half));
            first_even = less(2, __fmaf_ru(step, 1.5f, -half));
            even = less(2, __fmaf_ru(step, 1.75f, -half));
        }

        // `octaves` minus the smallest magnitude that reaches `bound`: rounded down, since the bound is rounded up.
        __device__ static uint32_t less(uint32_t octaves, float bound) {
            if constexpr (is_bf16<Element>) return (octaves << 23) - __float_as_uint(bound);
            else return ((octaves + 112) << 26) - (__float_as_uint(bound) << 3);   // exponents of f16 begin 112 later
        }
    };
};

// Whether an NVFP4 block with this largest magnitude (NaN if any value is) has a step as above, with
// plain_nvfp4_scale().
template <class Element>
__device__ inline bool has_thresholds(float amax, const Nvfp4Global &global) {
    const float least = is_bf16<Element> ? global.least : fmaxf(global.least, 0x1.cp-20f);   // 7 x 2^-22
    return amax <= global.most && (amax >= least || amax == 0.0f);
}

// The upper bytes of both halves of two words, in order.
__device__ inline uint32_t upper_bytes(uint32_t first, uint32_t second) { return __byte_perm(first, second, 0x7531); }

// Two words of codes() to one with two codes in the upper byte of each half, that of `first` below.
__device__ inline uint32_t join_upper_nibbles(uint32_t first, uint32_t second) {
    return ptx::select_bits(0xf0f0f0f0u, second, first >> 4);
}

// Four words of codes() to the codes of eight values in order, value i in bits 4 i + 3 .. 4 i.
__device__ inline Codes<4> join_upper_nibbles(const uint32_t (&words)[4]) {
    const uint32_t first = upper_bytes(words[0], words[1]), second = upper_bytes(words[2], words[3]);
    return {{join_upper_nibbles(__byte_perm(first, second, 0x6420), __byte_perm(first, second, 0x7531))}};
}

}   // namespace tile
