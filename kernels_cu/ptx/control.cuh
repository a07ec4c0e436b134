// Hints to caches: prefetch fetches a line of memory ahead of a load.
#pragma once

namespace ptx {

// The line that holds an address of global memory, into the L2.
__device__ inline void prefetch_global_l2(const void *global) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(global)));
}

}   // namespace ptx
