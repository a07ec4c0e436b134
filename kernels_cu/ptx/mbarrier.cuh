// mbarrier: barriers in shared memory that count arrivals of threads and bytes of copies, phase after phase (sm_90 and
// newer).
//
// A barrier is 8 bytes, 8-byte aligned. A phase ends after all arrivals that init declared and all expected bytes;
// parity is 0 for the first phase, 1 for the second, and so on. Source: PTX ISA 9.0, 9.7.13.15.
#pragma once

#include <cstdint>

#include "target.cuh"

namespace ptx {

template <bool available>
constexpr void check_mbarrier() {
    static_assert(available,
                  "mbarrier.try_wait and expect_tx need sm_90: choose cp.async by `if constexpr (ptx::has_bulk_copy)`");
}

// A new barrier in phase 0 that waits for `arrivals` arrivals a phase. By one thread; others see it after
// fence_mbarrier_init and a barrier of the block.
template <bool available = has_bulk_copy>
__device__ inline void mbarrier_init(uint32_t address, int arrivals) {
    check_mbarrier<available>();
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address), "r"(arrivals) : "memory");
}

// Makes barriers that this thread initialized visible to asynchronous copies.
template <bool available = has_bulk_copy>
__device__ inline void fence_mbarrier_init() {
    check_mbarrier<available>();
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Ends a barrier, so that its bytes can be reused. By one thread, when no thread uses it any more.
template <bool available = has_bulk_copy>
__device__ inline void mbarrier_inval(uint32_t address) {
    check_mbarrier<available>();
    asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(address) : "memory");
}

// One arrival. Earlier reads and writes of this thread precede all that waiting threads do afterwards.
template <bool available = has_bulk_copy>
__device__ inline void mbarrier_arrive(uint32_t address) {
    check_mbarrier<available>();
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address) : "memory");
}

// The same, and this phase also waits for `bytes` more bytes of copies. Call it before the copies are started.
template <bool available = has_bulk_copy>
__device__ inline void mbarrier_arrive_expect_tx(uint32_t address, uint32_t bytes) {
    check_mbarrier<available>();
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address), "r"(bytes) : "memory");
}

// Whether the phase of this parity is over; waits a while for it.
template <bool available = has_bulk_copy>
__device__ inline bool mbarrier_try_wait_parity(uint32_t address, uint32_t parity) {
    check_mbarrier<available>();
    int over;
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.s32 %0, 1, 0, p; }"
                 : "=r"(over)
                 : "r"(address), "r"(parity)
                 : "memory");
    return over;
}

// Waits until the phase of this parity is over: what arrived before it ended, threads' writes and copied bytes, is
// visible.
template <bool available = has_bulk_copy>
__device__ inline void mbarrier_wait_parity(uint32_t address, uint32_t parity) {
    while (!mbarrier_try_wait_parity<available>(address, parity)) {
    }
}

}   // namespace ptx
