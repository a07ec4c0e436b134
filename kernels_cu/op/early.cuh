// Launches that begin before the launch ahead has ended: docs/runtime.md has the rules.
#pragma once

#include "../ptx/griddepcontrol.cuh"

namespace op {

// Lets the launch behind begin. Called by any thread of a block, at any place.
__device__ inline void let_next_begin() { ptx::griddepcontrol_launch_dependents(); }

// Waits for the launches ahead. All threads of an entry that is launched early call this before they use global memory.
__device__ inline void wait_for_launches_ahead() { ptx::griddepcontrol_wait(); }

// The same before the use of an array that may be missing: null needs no wait.
__device__ inline void wait_for_launches_ahead(const void *used) {
    if (used) ptx::griddepcontrol_wait();
}

}   // namespace op
