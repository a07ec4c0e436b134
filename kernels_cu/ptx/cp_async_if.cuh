// cp.async under a predicate.
#pragma once

#include <cstdint>

namespace ptx {

// Starts copying 4, 8 or 16 bytes, both addresses multiples of that, through the L1, if `present`; else nothing is
// written. Without a branch: the predicate is the instruction's.
template <int bytes>
__device__ inline void cp_async_ca_if(bool present, uint32_t shared_address, const void *global) {
    asm volatile(
        "{\n\t"
        ".reg .pred present;\n\t"
        "setp.ne.s32 present, %3, 0;\n\t"
        "@present cp.async.ca.shared.global [%0], [%1], %2;\n\t"
        "}"
        :
        : "r"(shared_address), "l"(__cvta_generic_to_global(global)), "n"(bytes), "r"(int(present))
        : "memory");
}

}   // namespace ptx
