// cp.async of fewer bytes than a chunk.
#pragma once

#include <cstdint>

namespace ptx::portable {

// Starts copying 4, 8 or 16 bytes, both addresses multiples of that, through the L1. The first `present` of them are read,
// the others become zeros.
template <int bytes>
__device__ inline void cp_async_ca(uint32_t shared_address, const void *global, int present) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                 :
                 : "r"(shared_address), "l"(__cvta_generic_to_global(global)), "n"(bytes), "r"(present)
                 : "memory");
}

}  // namespace ptx::portable
