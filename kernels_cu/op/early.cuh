// Launches of a graph that begin before the launch ahead has ended: docs/runtime.md has the rules.
#pragma once

#include "../ptx/griddepcontrol.cuh"

namespace op {

// Lets the launch behind begin. Called by any thread of a block, at any place.
__device__ inline void let_next_begin() { ptx::griddepcontrol_launch_dependents(); }

// The beginning of an entry that is launched early: lets the launch behind begin, too, and waits for those ahead.
// Called by all threads before they use global memory.
__device__ inline void begin_early() {
    let_next_begin();
    ptx::griddepcontrol_wait();
}

}   // namespace op
