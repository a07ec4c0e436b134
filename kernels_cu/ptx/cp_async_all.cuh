// cp.async of which all bytes are read: without the comparisons and predicates of those in cp_async.cuh.
#pragma once

#include <cstdint>

namespace ptx {

// Starts copying 4 bytes through the L1; both addresses are multiples of 4.
__device__ inline void cp_async_ca_4_all(uint32_t shared_address, const void *global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;"
                 :
                 : "r"(shared_address), "l"(__cvta_generic_to_global(global))
                 : "memory");
}

// Starts copying 4 or 8 bytes likewise; both addresses are multiples of that.
template <int bytes>
__device__ inline void cp_async_ca_all(uint32_t shared_address, const void *global) {
    static_assert(bytes == 4 || bytes == 8);
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;"
                 :
                 : "r"(shared_address), "l"(__cvta_generic_to_global(global)), "n"(bytes)
                 : "memory");
}

}   // namespace ptx
