// Atomic updates of global memory without a result.
#pragma once

#include <cstdint>

namespace ptx {

// Sets bits of a number.
__device__ inline void red_relaxed_or(uint32_t *number, uint32_t bits) {
    asm volatile("red.relaxed.gpu.global.or.b32 [%0], %1;" ::"l"(__cvta_generic_to_global(number)), "r"(bits)
                 : "memory");
}

}   // namespace ptx
