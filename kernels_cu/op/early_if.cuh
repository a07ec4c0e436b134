// Launches that let the launch behind begin only if it is one that waits for them.
#pragma once

#include "early.cuh"

namespace op {

// As let_next_begin(). Whether it is called must not differ within a launch.
__device__ inline void let_next_begin_if(bool begins) {
    if (begins) let_next_begin();
}

// As wait_for_launches_ahead(), in entries that begin early.
template <bool begins_early>
__device__ inline void wait_for_launches_ahead_if() {
    if constexpr (begins_early) wait_for_launches_ahead();
}

}   // namespace op
