// Probes: experiments that find from which registers a matrix instruction takes each element and each scale, and where
// it puts results.
//
// The experiments assume no layout. Elements are numbered by lane, then by register of the operand, then from a
// register's lowest bits on; scales by lane, then by byte of the scale register. A result that no single number
// explains is `not_one`.
#pragma once

#include <cstdint>
#include <tuple>
#include <type_traits>

#include "../kernel.cuh"
#include "../ptx/mma.cuh"
#include "../ptx/mma_plain.cuh"
#include "../ptx/warp.cuh"

namespace op {

constexpr int nothing = -1;   // no output here
constexpr int not_one = -2;   // several numbers, or another value than the experiment can give

// ---------------------------------------------------------------------------------------------------------------------
// The instructions. Members:
//   width             elements in a register
//   ones_a, ones_b    a register of A, of B, whose elements are all 1
//   digits_b          a register of B with the first `width` of 1, 2, 3, 4, -1, -2, -3, -4 in order
//   unit_scales       a register of block scales of 1
//   scales_2_4_8_16   a register with the scales 2, 4, 8, 16 in bytes 0 to 3
//   bytes, byte_step  how many bytes the selectors can name, and how far these are apart

struct Bf16 {
    static constexpr int width = 2;
    static constexpr uint32_t ones_a = 0x3f803f80, ones_b = ones_a, digits_b = 0x40003f80, unit_scales = 0;

    template <int, int, int, int>
    __device__ static void multiply(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], uint32_t, uint32_t) {
        ptx::mma_m16n8k16_bf16(c, a, b);
    }
};

struct F16 {
    static constexpr int width = 2;
    static constexpr uint32_t ones_a = 0x3c003c00, ones_b = ones_a, digits_b = 0x40003c00, unit_scales = 0;

    template <int, int, int, int>
    __device__ static void multiply(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], uint32_t, uint32_t) {
        ptx::mma_m16n8k16_f16(c, a, b);
    }
};

struct ScalesUe8m0 {
    static constexpr uint32_t unit_scales = 0x7f7f7f7f, scales_2_4_8_16 = 0x83828180;
};
struct ScalesUe4m3 {
    static constexpr uint32_t unit_scales = 0x38383838, scales_2_4_8_16 = 0x58504840;
};

// Four elements in containers: 1, 2, 3, 4.
template <class Format>
constexpr uint32_t container_digits = std::is_same_v<Format, ptx::E4m3>   ? 0x48444038
                                      : std::is_same_v<Format, ptx::E5m2> ? 0x4442403c
                                      : std::is_same_v<Format, ptx::E3m2> ? 0x1412100c
                                                                          : 0x18141008;   // e2m3, e2m1

template <class FormatA, class FormatB>
struct Containers {
    static constexpr int width = 4;
    static constexpr uint32_t digits_b = container_digits<FormatB>, ones_b = (digits_b & 0xff) * 0x01010101;
    static constexpr uint32_t ones_a = (container_digits<FormatA> & 0xff) * 0x01010101, unit_scales = 0;
};

// c[i] = half i % 2 of register i / 2 of an f16 accumulator, which begins with 0, after multiply(registers).
template <class Multiply>
__device__ inline void multiply_in_f16(float (&c)[4], Multiply &&multiply) {
    uint32_t halves[2] = {};
    multiply(halves);
#pragma unroll
    for (int i = 0; i < 4; ++i) c[i] = ptx::portable::f32_from_half(halves[i / 2], i % 2 != 0);
}

struct F16InF16 : F16 {
    template <int, int, int, int>
    __device__ static void multiply(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], uint32_t, uint32_t) {
        multiply_in_f16(c, [&](uint32_t (&halves)[2]) { ptx::mma_m16n8k16_f16_f16(halves, a, b); });
    }
};

struct Tf32 {
    static constexpr int width = 1;
    static constexpr uint32_t ones_a = 0x3f800000, ones_b = ones_a, digits_b = ones_a, unit_scales = 0;

    template <int, int, int, int>
    __device__ static void multiply(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], uint32_t, uint32_t) {
        ptx::mma_m16n8k8_tf32(c, a, b);
    }
};

template <bool is_signed>
struct Bytes {
    static constexpr int width = 4;
    static constexpr uint32_t ones_a = 0x01010101, ones_b = ones_a, digits_b = 0x04030201, unit_scales = 0;

    template <int, int, int, int>
    __device__ static void multiply(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], uint32_t, uint32_t) {
        int sums[4] = {};
        ptx::mma_m16n8k32_bytes<is_signed>(sums, a, b);
#pragma unroll
        for (int i = 0; i < 4; ++i) c[i] = sums[i];
    }
};

// Containers without scales: kind::f8f6f4, or without a kind; accumulators of f32 or f16.
template <class FormatA, class FormatB, bool has_kind, bool in_f16>
struct Unscaled : Containers<FormatA, FormatB> {
    template <class Sums>
    __device__ static void into(Sums &sums, const uint32_t (&a)[4], const uint32_t (&b)[2]) {
        if constexpr (has_kind) ptx::mma_m16n8k32_f8f6f4<FormatA, FormatB>(sums, a, b);
        else ptx::mma_m16n8k32_fp8<FormatA, FormatB>(sums, a, b);
    }

    template <int, int, int, int>
    __device__ static void multiply(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], uint32_t, uint32_t) {
        if constexpr (in_f16) multiply_in_f16(c, [&](uint32_t (&halves)[2]) { into(halves, a, b); });
        else into(c, a, b);
    }
};

template <class FormatA, class FormatB>
struct Mxf8f6f4 : Containers<FormatA, FormatB> {
    static constexpr uint32_t unit_scales = ScalesUe8m0::unit_scales, scales_2_4_8_16 = ScalesUe8m0::scales_2_4_8_16;
    static constexpr int bytes = 4, byte_step = 1;

    template <int byte_a, int thread_a, int byte_b, int thread_b>
    __device__ static void multiply(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], uint32_t scale_a,
                                    uint32_t scale_b) {
        ptx::mma_m16n8k32_mxf8f6f4<FormatA, FormatB, byte_a, thread_a, byte_b, thread_b>(c, a, b, scale_a, scale_b);
    }
};

struct PackedE2m1 {
    static constexpr int width = 8;
    static constexpr uint32_t ones_a = 0x22222222, ones_b = ones_a, digits_b = 0xedca6542;
};

struct Mxf4 : PackedE2m1, ScalesUe8m0 {
    static constexpr int bytes = 2, byte_step = 2;

    template <int byte_a, int thread_a, int byte_b, int thread_b>
    __device__ static void multiply(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], uint32_t scale_a,
                                    uint32_t scale_b) {
        ptx::mma_m16n8k64_mxf4<byte_a, thread_a, byte_b, thread_b>(c, a, b, scale_a, scale_b);
    }
};

struct Mxf4nvf4With2 : PackedE2m1, ScalesUe8m0 {
    static constexpr int bytes = 2, byte_step = 2;

    template <int byte_a, int thread_a, int byte_b, int thread_b>
    __device__ static void multiply(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], uint32_t scale_a,
                                    uint32_t scale_b) {
        ptx::mma_m16n8k64_mxf4nvf4_2x<byte_a, thread_a, byte_b, thread_b>(c, a, b, scale_a, scale_b);
    }
};

struct Mxf4nvf4 : PackedE2m1, ScalesUe4m3 {
    static constexpr int bytes = 1, byte_step = 0;

    template <int byte_a, int thread_a, int byte_b, int thread_b>
    __device__ static void multiply(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], uint32_t scale_a,
                                    uint32_t scale_b) {
        ptx::mma_m16n8k64_mxf4nvf4<thread_a, thread_b>(c, a, b, scale_a, scale_b);
    }
};

constexpr int registers_a = 32 * 4, registers_b = 32 * 2;   // of all lanes

// ---------------------------------------------------------------------------------------------------------------------
// Experiments. One warp runs each, on an instruction: an object whose members may be known at compile time or not.
// multiply() of such an object chooses between several instructions, so that the code of an experiment is compiled
// once.

// Calls use(byte, thread) with selectors that are known at compile time.
template <int bytes, int threads, class Use>
__device__ inline void with_selectors(int byte, int thread, Use &&use) {
    static_for<bytes>([&](auto first) {
        static_for<threads>([&](auto second) {
            if (byte == first && thread == second) use(first, second);
        });
    });
}

// operand = `ones` & `mask` in register `number` of the warp's registers, and 0 in all others.
template <int registers>
__device__ inline void set_only(uint32_t (&operand)[registers], uint32_t ones, int number,
                                uint32_t mask = 0xffffffffu) {
    const int mine = number - registers * ptx::laneid();
#pragma unroll
    for (int i = 0; i < registers; ++i) operand[i] = mine == i ? ones & mask : 0;
}

// How one output changes over a series of trials. Places are numbered, and each bit of the numbers has two trials: the
// first changes the places with that bit, the second those without it. If a single place changes the output, exactly
// one trial of each pair changes it, always to the same value.
struct Witness {
    float before, seen = 0.0f;                               // the output without changes; the last value with one
    int place = 0;                                           // the bits found so far
    bool moved = false, moved_last = false, is_one = true;   // is_one: a single place explains all trials

    __device__ void look(int trial, float output) {
        const bool moves = output != before;
        is_one = is_one && !(moves && moved && output != seen) && !(trial % 2 == 1 && moves == moved_last);
        place |= int(trial % 2 == 0 && moves) << trial / 2;
        seen = moves ? output : seen;
        moved = moved || moves;
        moved_last = moves;
    }
};

// Runs the two trials of each of `bits` bits: trial(c, is_different) changes the places for which is_different(place)
// is true.
template <int bits, class Trial>
__device__ inline void look_at_all(Witness (&outputs)[4], Trial &&trial) {
#pragma unroll 1
    for (int i = 0; i < 2 * bits; ++i) {
        float c[4] = {};
        trial(c, [&](int place) { return (place >> i / 2 & 1) != i % 2; });
#pragma unroll
        for (int output = 0; output < 4; ++output) outputs[output].look(i, c[output]);
    }
}

// meets[lane][i]: the element of B whose product with element `number` of A is output i of the lane. The trials fill
// the registers of B that is_different() selects with digits_b, and others with 0; the value of the product identifies
// the element of a register.
template <class Instruction>
__device__ inline void probe_elements(const Instruction &instruction, int *meets, int number) {
    constexpr int width = Instruction::width, bits = 32 / width;
    uint32_t a[4];
    set_only(a, instruction.ones_a, number / width, 0xffffffffu >> (32 - bits) << (bits * (number % width)));
    Witness outputs[4] = {{0.0f}, {0.0f}, {0.0f}, {0.0f}};
    look_at_all<6>(outputs, [&](float (&c)[4], auto &&is_different) {
        uint32_t b[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) b[i] = is_different(2 * ptx::laneid() + i) ? instruction.digits_b : 0;
        instruction.template multiply<0, 0, 0, 0>(c, a, b, Instruction::unit_scales, Instruction::unit_scales);
    });
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float seen = outputs[i].seen;
        const int digit = fabsf(seen), element = digit - 1 + (seen < 0.0f ? 4 : 0);
        const bool fits = outputs[i].is_one && fabsf(seen) == digit && 1 <= digit && digit <= 4 && element < width;
        meets[4 * ptx::laneid() + i] = !outputs[i].moved ? nothing
                                       : fits            ? outputs[i].place * width + element
                                                         : not_one;
    }
}

// The common finding of two outputs; `nothing` agrees with any.
__device__ inline int agreed(int first, int second) {
    return first == nothing ? second : second == nothing || first == second ? first : not_one;
}

// The number of the scale that multiplies c, the result of multiply(c, scales), where `scales` is the scale register of
// one operand. With unit scales, each element of c is 0 or the number of elements of a register. The trials set the
// scales of the lanes that is_different() selects to 2, 4, 8, 16.
template <class Instruction, class Multiply>
__device__ inline int probe_scale(Multiply &&multiply) {
    constexpr float whole = Instruction::width;
    float unit[4] = {};
    multiply(unit, Instruction::unit_scales);
    Witness outputs[4] = {{unit[0]}, {unit[1]}, {unit[2]}, {unit[3]}};
    look_at_all<5>(outputs, [&](float (&c)[4], auto &&is_different) {
        multiply(c, is_different(ptx::laneid()) ? Instruction::scales_2_4_8_16 : Instruction::unit_scales);
    });
    int found[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float seen = outputs[i].seen;
        const int byte = seen == 2 * whole ? 0 : seen == 4 * whole ? 1 : seen == 8 * whole ? 2 : 3;
        const bool fits = unit[i] == whole && outputs[i].is_one && seen == float(2 << byte) * whole;
        found[i] = unit[i] == 0.0f && !outputs[i].moved ? nothing : fits ? 4 * outputs[i].place + byte : not_one;
    }
    int all = agreed(agreed(found[0], found[1]), agreed(found[2], found[3]));
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) all = agreed(all, ptx::shfl_sync_bfly_b32(all, distance));
    return all;
}

// scales_a[byte selector][thread selector][registers of A]: the scale that multiplies all elements of register
// `number` of A, those of B being ones.
template <class Instruction>
__device__ inline void probe_scales_a(const Instruction &instruction, int *scales, int number) {
    constexpr int step = Instruction::byte_step;
    uint32_t a[4];
    set_only(a, instruction.ones_a, number);
    const uint32_t b[2] = {instruction.ones_b, instruction.ones_b};
#pragma unroll 1
    for (int i = 0; i < Instruction::bytes * 2; ++i) {
        const int found = probe_scale<Instruction>([&](float (&c)[4], uint32_t scale) {
            with_selectors<Instruction::bytes, 2>(i / 2, i % 2, [&](auto byte, auto thread) {
                instruction.template multiply<byte * step, thread, 0, 0>(c, a, b, scale, Instruction::unit_scales);
            });
        });
        if (ptx::laneid() == 0) scales[i * registers_a + number] = found;
    }
}

// scales_b[byte selector][thread selector][registers of B]: the same for B.
template <class Instruction>
__device__ inline void probe_scales_b(const Instruction &instruction, int *scales, int number) {
    constexpr int step = Instruction::byte_step;
    const uint32_t a[4] = {instruction.ones_a, instruction.ones_a, instruction.ones_a, instruction.ones_a};
    uint32_t b[2];
    set_only(b, instruction.ones_b, number);
#pragma unroll 1
    for (int i = 0; i < Instruction::bytes * 4; ++i) {
        const int found = probe_scale<Instruction>([&](float (&c)[4], uint32_t scale) {
            with_selectors<Instruction::bytes, 4>(i / 4, i % 4, [&](auto byte, auto thread) {
                instruction.template multiply<0, 0, byte * step, thread>(c, a, b, Instruction::unit_scales, scale);
            });
        });
        if (ptx::laneid() == 0) scales[i * registers_b + number] = found;
    }
}

// The scales of register `number` of A and of B, each only if that register exists and its output is not null.
template <class Instruction>
__device__ inline void probe_scales(const Instruction &instruction, int *scales_a, int *scales_b, int number) {
    if (scales_a != nullptr && number < registers_a) probe_scales_a(instruction, scales_a, number);
    if (scales_b != nullptr && number < registers_b) probe_scales_b(instruction, scales_b, number);
}

// Formats of containers by number: 0 e4m3, 1 e5m2, 2 e2m1, 3 e3m2, 4 e2m3.
using Formats = std::tuple<ptx::E4m3, ptx::E5m2, ptx::E2m1, ptx::E3m2, ptx::E2m3>;
constexpr int formats = std::tuple_size_v<Formats>;

// Calls use(format) with the type of a numbered format.
template <class Use>
__device__ inline void with_format(int format, Use &&use) {
    static_for<formats>([&](auto each) {
        if (format == each) use(std::tuple_element_t<each, Formats>{});
    });
}

// A pair of formats chosen at run time.
struct NumberedContainers {
    static constexpr int width = 4;
    int format_a, format_b;
    uint32_t ones_a, ones_b, digits_b;

    __device__ NumberedContainers(int format_a, int format_b) : format_a(format_a), format_b(format_b) {
        with_format(format_a, [&](auto format) { ones_a = Containers<decltype(format), decltype(format)>::ones_a; });
        with_format(format_b, [&](auto format) {
            ones_b = Containers<decltype(format), decltype(format)>::ones_b;
            digits_b = Containers<decltype(format), decltype(format)>::digits_b;
        });
    }

    // Calls use(A, B) with their types.
    template <class Use>
    __device__ void with_types(Use &&use) const {
        with_format(format_a, [&](auto a) { with_format(format_b, [&](auto b) { use(a, b); }); });
    }
};

struct NumberedMxf8f6f4 : NumberedContainers, ScalesUe8m0 {
    using NumberedContainers::NumberedContainers;

    template <int byte_a, int thread_a, int byte_b, int thread_b>
    __device__ void multiply(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], uint32_t scale_a,
                             uint32_t scale_b) const {
        with_types([&](auto first, auto second) {
            Mxf8f6f4<decltype(first), decltype(second)>::template multiply<byte_a, thread_a, byte_b, thread_b>(
                c, a, b, scale_a, scale_b);
        });
    }
};

template <bool in_f16>
struct NumberedF8f6f4 : NumberedContainers {
    static constexpr uint32_t unit_scales = 0;
    using NumberedContainers::NumberedContainers;

    template <int, int, int, int>
    __device__ void multiply(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], uint32_t, uint32_t) const {
        with_types([&](auto first, auto second) {
            Unscaled<decltype(first), decltype(second), true, in_f16>::template multiply<0, 0, 0, 0>(c, a, b, 0, 0);
        });
    }
};

// kind::mxf8f6f4 with both operands in e4m3, e3m2 or e2m3, for experiments with scales.
struct Mxf8f6f4WithScales : NumberedMxf8f6f4 {
    static constexpr int bytes = 4, byte_step = 1;
    using NumberedMxf8f6f4::NumberedMxf8f6f4;

    template <int byte_a, int thread_a, int byte_b, int thread_b>
    __device__ void multiply(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], uint32_t scale_a,
                             uint32_t scale_b) const {
        with_format(format_a, [&](auto format) {
            using Format = decltype(format);
            if constexpr (!std::is_same_v<Format, ptx::E5m2> && !std::is_same_v<Format, ptx::E2m1>)
                Mxf8f6f4<Format, Format>::template multiply<byte_a, thread_a, byte_b, thread_b>(c, a, b, scale_a,
                                                                                                scale_b);
        });
    }
};

// Elements of kind::mxf8f6f4 for a pair of formats, and its scales. These are probed with e3m2 or e2m3 if A and B both
// have that format, else with e4m3.
__device__ inline void probe_mxf8f6f4(int *meets, int *scales_a, int *scales_b, int format_a, int format_b,
                                      int number) {
    probe_elements(NumberedMxf8f6f4(format_a, format_b), meets, number);
    const int format = format_a == format_b && format_a >= 3 ? format_a : 0;
    probe_scales(Mxf8f6f4WithScales(format, format), scales_a, scales_b, number);
}

// Elements of kind::f8f6f4 for a pair of formats.
template <bool in_f16>
__device__ inline void probe_f8f6f4(int *meets, int format_a, int format_b, int number) {
    probe_elements(NumberedF8f6f4<in_f16>(format_a, format_b), meets, number);
}

// Elements of the forms without a kind, by number: 0 f16 in f16, 1 tf32, 2 s8, 3 u8, 4 e4m3, 5 e5m2, 6 e4m3 in f16, 7
// e5m2 in f16.
using Plain = std::tuple<F16InF16, Tf32, Bytes<true>, Bytes<false>, Unscaled<ptx::E4m3, ptx::E4m3, false, false>,
                         Unscaled<ptx::E5m2, ptx::E5m2, false, false>, Unscaled<ptx::E4m3, ptx::E4m3, false, true>,
                         Unscaled<ptx::E5m2, ptx::E5m2, false, true>>;
constexpr int plain_forms = std::tuple_size_v<Plain>;

__device__ inline void probe_plain(int *meets, int form, int number) {
    static_for<plain_forms>([&](auto each) {
        if (form == each) probe_elements(std::tuple_element_t<each, Plain>{}, meets, number);
    });
}

}   // namespace op
