// Barriers of some warps of a block.
#pragma once

namespace ptx {

// `threads` threads arrive at one of the barriers 1 to 15; what any of them wrote to shared or global memory before is
// visible to all after. The two sides may wait in different places of the code: this form is not .aligned, which tools
// take to mean one place for the whole block.
__device__ inline void bar_sync(int barrier, int threads) {
    asm volatile("barrier.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}   // namespace ptx
