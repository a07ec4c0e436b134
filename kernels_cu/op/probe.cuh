// Probes: where a matrix instruction takes each element and each scale from, and where it puts results, found by trying.
//
// Nothing here knows a layout. Elements are numbered by lane, then by register of the operand, then from a register's lowest bits
// on; scales by lane, then by byte of the scale register. What no single number explains is `not_one`.
#pragma once

#include <cstdint>
#include <tuple>
#include <type_traits>

#include "../kernel.cuh"
#include "../ptx/mma.cuh"
#include "../ptx/warp.cuh"

namespace op {

constexpr int nothing = -1;   // no output here
constexpr int not_one = -2;   // several numbers, or another value than the experiment can give

// ---------------------------------------------------------------------------------------------------------------------
// The instructions: elements in a register, registers of A and B whose elements are all 1, one of B with 1, 2, 3,
// 4, -1, -2, -3, -4 in order; for block scales a register of ones, one of 2, 4, 8, 16 in bytes 0 to 3, how many bytes the selectors can name, and
// how far these are apart.

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
                                                                          : 0x18141008;   // e2m1

template <class FormatA, class FormatB>
struct Mxf8f6f4 : ScalesUe8m0 {
    static constexpr int width = 4, bytes = 4, byte_step = 1;
    static constexpr uint32_t digits_b = container_digits<FormatB>, ones_b = (digits_b & 0xff) * 0x01010101;
    static constexpr uint32_t ones_a = (container_digits<FormatA> & 0xff) * 0x01010101;

    template <int byte_a, int thread_a, int byte_b, int thread_b>
    __device__ static void multiply(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], uint32_t scale_a, uint32_t scale_b) {
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
    __device__ static void multiply(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], uint32_t scale_a, uint32_t scale_b) {
        ptx::mma_m16n8k64_mxf4<byte_a, thread_a, byte_b, thread_b>(c, a, b, scale_a, scale_b);
    }
};

struct Mxf4nvf4 : PackedE2m1, ScalesUe4m3 {
    static constexpr int bytes = 1, byte_step = 0;

    template <int byte_a, int thread_a, int byte_b, int thread_b>
    __device__ static void multiply(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], uint32_t scale_a, uint32_t scale_b) {
        ptx::mma_m16n8k64_mxf4nvf4<thread_a, thread_b>(c, a, b, scale_a, scale_b);
    }
};

constexpr int registers_a = 32 * 4, registers_b = 32 * 2;   // of all lanes

// ---------------------------------------------------------------------------------------------------------------------
// Experiments. Each is done by one warp.

// An operand, given as registers of ones, of which register `number` is left, and there the bits of `mask`.
template <int registers>
__device__ inline void set_only(uint32_t (&operand)[registers], uint32_t ones, int number, uint32_t mask = 0xffffffffu) {
    const int mine = number - registers * ptx::laneid();
#pragma unroll
    for (int i = 0; i < registers; ++i) operand[i] = mine == i ? ones & mask : 0;
}

// What one output does over a series of trials: how often it is not what it was without, when last, and what it is then.
struct Witness {
    float before, seen = 0.0f;
    int trial = 0, times = 0;

    __device__ void look(float output, int number) {
        const bool changed = output != before;
        seen = changed ? output : seen;
        trial = changed ? number : trial;
        times += changed;
    }
};

// meets[lane][i]: the element of B whose product with element `number` of A is output i of the lane. One register of one lane of
// B at a time is not 0; the product tells which of its elements it is.
template <class Instruction>
__device__ inline void probe_elements(int *meets, int number) {
    constexpr int width = Instruction::width, bits = 32 / width;
    uint32_t a[4];
    set_only(a, Instruction::ones_a, number / width, 0xffffffffu >> (32 - bits) << (bits * (number % width)));
    Witness outputs[4] = {{0.0f}, {0.0f}, {0.0f}, {0.0f}};
#pragma unroll 1
    for (int place = 0; place < registers_b; ++place) {
        uint32_t b[2];
        set_only(b, Instruction::digits_b, place);
        float c[4] = {};
        Instruction::template multiply<0, 0, 0, 0>(c, a, b, Instruction::unit_scales, Instruction::unit_scales);
#pragma unroll
        for (int i = 0; i < 4; ++i) outputs[i].look(c[i], place);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float seen = outputs[i].seen;
        const int digit = fabsf(seen), element = digit - 1 + (seen < 0.0f ? 4 : 0);
        const bool fits = outputs[i].times == 1 && fabsf(seen) == digit && 1 <= digit && digit <= 4 && element < width;
        meets[4 * ptx::laneid() + i] =
            outputs[i].times == 0 ? nothing : fits ? outputs[i].trial * width + element : not_one;
    }
}

// What two outputs found together.
__device__ inline int agreed(int first, int second) {
    return first == nothing ? second : second == nothing || first == second ? first : not_one;
}

// The scale, of those in one operand's scale register, that multiplies what multiply(c, scales) leaves in c with unit scales,
// which is 0 or the number of elements of a register. One lane at a time has scales 2, 4, 8, 16.
template <class Instruction, class Multiply>
__device__ inline int probe_scale(Multiply &&multiply) {
    constexpr float whole = Instruction::width;
    float unit[4] = {};
    multiply(unit, Instruction::unit_scales);
    Witness outputs[4] = {{unit[0]}, {unit[1]}, {unit[2]}, {unit[3]}};
#pragma unroll 1
    for (int lane = 0; lane < 32; ++lane) {
        float c[4] = {};
        multiply(c, ptx::laneid() == lane ? Instruction::scales_2_4_8_16 : Instruction::unit_scales);
#pragma unroll
        for (int i = 0; i < 4; ++i) outputs[i].look(c[i], lane);
    }
    int found[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float seen = outputs[i].seen;
        const int byte = seen == 2 * whole ? 0 : seen == 4 * whole ? 1 : seen == 8 * whole ? 2 : 3;
        const bool fits = unit[i] == whole && outputs[i].times == 1 && seen == float(2 << byte) * whole;
        found[i] = unit[i] == 0.0f && outputs[i].times == 0 ? nothing : fits ? 4 * outputs[i].trial + byte : not_one;
    }
    int all = agreed(agreed(found[0], found[1]), agreed(found[2], found[3]));
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) all = agreed(all, ptx::shfl_sync_bfly_b32(all, distance));
    return all;
}

// scales_a[byte selector][thread selector][registers of A]: the scale that multiplies all elements of register `number` of A, those
// of B being ones.
template <class Instruction>
__device__ inline void probe_scales_a(int *scales, int number) {
    uint32_t a[4];
    set_only(a, Instruction::ones_a, number);
    const uint32_t b[2] = {Instruction::ones_b, Instruction::ones_b};
    static_for<Instruction::bytes>([&](auto byte) {
        static_for<2>([&](auto thread) {
            const int found = probe_scale<Instruction>([&](float (&c)[4], uint32_t scale) {
                Instruction::template multiply<byte * Instruction::byte_step, thread, 0, 0>(c, a, b, scale, Instruction::unit_scales);
            });
            if (ptx::laneid() == 0) scales[(byte * 2 + thread) * registers_a + number] = found;
        });
    });
}

// scales_b[byte selector][thread selector][registers of B]: the same for B.
template <class Instruction>
__device__ inline void probe_scales_b(int *scales, int number) {
    const uint32_t a[4] = {Instruction::ones_a, Instruction::ones_a, Instruction::ones_a, Instruction::ones_a};
    uint32_t b[2];
    set_only(b, Instruction::ones_b, number);
    static_for<Instruction::bytes>([&](auto byte) {
        static_for<4>([&](auto thread) {
            const int found = probe_scale<Instruction>([&](float (&c)[4], uint32_t scale) {
                Instruction::template multiply<0, 0, byte * Instruction::byte_step, thread>(c, a, b, Instruction::unit_scales, scale);
            });
            if (ptx::laneid() == 0) scales[(byte * 4 + thread) * registers_b + number] = found;
        });
    });
}

// The scales of register `number` of A and of B, as far as there is one, each left out where there is nowhere to put it.
template <class Instruction>
__device__ inline void probe_scales(int *scales_a, int *scales_b, int number) {
    if (scales_a != nullptr && number < registers_a) probe_scales_a<Instruction>(scales_a, number);
    if (scales_b != nullptr && number < registers_b) probe_scales_b<Instruction>(scales_b, number);
}

// Elements of kind::mxf8f6f4 for a pair of formats: 0 e4m3, 1 e5m2, 2 e2m1.
__device__ inline void probe_elements_mxf8f6f4(int *meets, int format_a, int format_b, int number) {
    using Formats = std::tuple<ptx::E4m3, ptx::E5m2, ptx::E2m1>;
    static_for<3>([&](auto first) {
        static_for<3>([&](auto second) {
            using Instruction = Mxf8f6f4<std::tuple_element_t<first, Formats>, std::tuple_element_t<second, Formats>>;
            if (format_a == first && format_b == second) probe_elements<Instruction>(meets, number);
        });
    });
}

}  // namespace op
