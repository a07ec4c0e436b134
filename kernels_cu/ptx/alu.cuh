// mov: a copy that the compiler does not see through.
#pragma once

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

}   // namespace ptx
