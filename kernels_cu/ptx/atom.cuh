// Atomic updates of global memory.
#pragma once

#include <cstdint>

namespace ptx {

// Adds 1, or sets the number to 0 if it is `last`, and returns what it was. What this thread and those that it met at a
// barrier wrote before is visible to the threads that update the number later.
__device__ inline uint32_t atom_acq_rel_inc(uint32_t *number, uint32_t last) {
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(__cvta_generic_to_global(number)), "r"(last)
                 : "memory");
    return before;
}

// Sets bits of a number.
__device__ inline void red_relaxed_or(uint32_t *number, uint32_t bits) {
    asm volatile("red.relaxed.gpu.global.or.b32 [%0], %1;" ::"l"(__cvta_generic_to_global(number)), "r"(bits)
                 : "memory");
}

}   // namespace ptx
