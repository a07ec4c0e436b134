// Launches that begin before the one ahead of them has ended. Older architectures have no such launches: there both
// functions do nothing.
#pragma once

#include "control.cuh"
#include "target.cuh"

namespace ptx {

constexpr bool has_griddepcontrol = architecture >= 90;

// The launch behind may begin, as far as it waits by griddepcontrol_wait(), once every block has called this or ended.
__device__ inline void griddepcontrol_launch_dependents() {
    if constexpr (has_griddepcontrol) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Waits until the launches ahead have ended and everything sees what they wrote. Entries that call this may be launched
// early. Before it they must neither read nor write global memory, and no thread may end; prefetches into the L2 are
// allowed.
__device__ inline void griddepcontrol_wait() {
    if constexpr (has_griddepcontrol) asm volatile("griddepcontrol.wait;" ::: "memory");
}

// A prefetch that only an early launch is worth.
__device__ inline void prefetch_global_l2_early(const void *global) {
    if constexpr (has_griddepcontrol) prefetch_global_l2(global);
}

}   // namespace ptx
