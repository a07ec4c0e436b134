// Predicated loads from global memory, and values whose computations stay on their branch.
#pragma once

#include <cstdint>

namespace ptx {

// 16 bytes that no thread writes while the kernel runs, at a multiple of 16. If `present` is false, nothing is read and
// the words are 0. One predicated instruction: behind a branch, or with a selection, the compiler copies a word as soon
// as it arrives, which waits for the load.
__device__ inline void ld_global_nc_16(uint32_t (&words)[4], const void *global, bool present) {
    asm volatile(
        "{ .reg .pred p; setp.ne.s32 p, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;\n"
        "@p ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4]; }"
        : "=&r"(words[0]), "=&r"(words[1]), "=&r"(words[2]), "=&r"(words[3])
        : "l"(__cvta_generic_to_global(global)), "r"(int(present)));
}

// Returns `number` through an asm statement. The compiler then cannot hoist computations on it above a branch, where
// their results would occupy registers on every path.
__device__ inline int of_this_branch(int number) {
    asm volatile("mov.b32 %0, %0;" : "+r"(number));
    return number;
}
template <class T>
__device__ inline T *of_this_branch(T *address) {
    asm volatile("mov.b64 %0, %0;" : "+l"(address));
    return address;
}

}   // namespace ptx
