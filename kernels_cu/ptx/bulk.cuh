// cp.async.bulk: copies of whole runs of bytes that one thread starts and an mbarrier counts (sm_90 and newer).
#pragma once

#include <cstdint>

#include "target.cuh"

namespace ptx {

// Starts copying `bytes` bytes from global to shared memory of this block; both addresses 16-byte aligned, `bytes` a
// multiple of 16. On arrival they count as `bytes` of the barrier's expected bytes. Called by one lane, elected with
// elect_sync. If threads wrote or read the target before, fence_proxy_async and a barrier must come between. Source:
// PTX ISA 9.0, 9.7.9.25.4.
template <bool available = has_bulk_copy>
__device__ inline void cp_async_bulk_shared_global(uint32_t shared_address, const void *global, uint32_t bytes,
                                                   uint32_t mbarrier) {
    static_assert(available, "cp.async.bulk needs sm_90: choose cp.async by `if constexpr (ptx::has_bulk_copy)`");
    asm volatile("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :
                 : "r"(shared_address), "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(mbarrier)
                 : "memory");
}

// Orders this thread's accesses to shared memory before bulk copies that are started later.
template <bool available = has_bulk_copy>
__device__ inline void fence_proxy_async() {
    static_assert(available, "cp.async.bulk needs sm_90: choose cp.async by `if constexpr (ptx::has_bulk_copy)`");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}   // namespace ptx
