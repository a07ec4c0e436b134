// mov and mad, where the compiler's own choice costs more.
#pragma once

#include <cstdint>

namespace ptx {

// The value itself, for the compiler another one at every call, so that values computed from it are neither kept in
// registers across iterations of a loop nor computed before they are needed.
__device__ inline int mov_b32(int value) {
    asm volatile("mov.b32 %0, %0;" : "+r"(value));
    return value;
}
__device__ inline float mov_b32(float value) {
    asm volatile("mov.b32 %0, %0;" : "+f"(value));
    return value;
}

// One half of a pair in both halves. Multiplications take this as a modifier of their operand, without an instruction;
// of a permutation they would not.
__device__ inline uint32_t mov_b32_half_twice(uint32_t pair, bool upper) {
    uint32_t both;
    if (upper)
        asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {high, high}; }" : "=r"(both) : "r"(pair));
    else asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {low, low}; }" : "=r"(both) : "r"(pair));
    return both;
}

// a * b + c, by a multiplication whatever b and c are: the compiler makes no shifts, masks or additions of it.
template <int b>
__device__ inline uint32_t mad_lo_s32(uint32_t a, uint32_t c) {
    uint32_t sum;
    asm("mad.lo.s32 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "n"(b), "r"(c));
    return sum;
}

}   // namespace ptx
