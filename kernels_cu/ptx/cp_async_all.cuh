// cp.async of which all bytes are read: without the comparisons and predicates of those in cp_async.cuh.
#pragma once

#include <cstdint>

namespace ptx {

// Start copying 16 or 4 bytes, both addresses multiples of that; the latter through the L1.
__device__ inline void cp_async_cg_16_all(uint32_t shared_address, const void *global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 :
                 : "r"(shared_address), "l"(__cvta_generic_to_global(global))
                 : "memory");
}
__device__ inline void cp_async_ca_4_all(uint32_t shared_address, const void *global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;"
                 :
                 : "r"(shared_address), "l"(__cvta_generic_to_global(global))
                 : "memory");
}

}   // namespace ptx
