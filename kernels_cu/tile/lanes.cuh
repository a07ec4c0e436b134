// A lane's item of 32, sums over the lanes up to it, and the number of lanes before it that are in a ballot.
#pragma once

#include <cstdint>

#include "../ptx/warp.cuh"

namespace tile {

// True in one lane of a warp.
__device__ inline bool is_first_lane() { return ptx::laneid() == 0; }

// The item of this lane, of 32 consecutive ones from `first` on.
template <class Index>
__device__ inline Index lane_item(Index first) {
    return first + ptx::laneid();
}

// The element of this lane, of one for each lane.
template <class Element>
__device__ inline Element &of_lane(Element (&elements)[32]) {
    return elements[ptx::laneid()];
}

// The sum of a number of each lane from the first to this one. Called by the whole warp.
__device__ inline int sum_to_lane(int value) {
    const int lane = ptx::laneid();
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int before = ptx::shfl_sync_idx_b32(value, max(lane - step, 0));
        value += lane < step ? 0 : before;
    }
    return value;
}

// How many lanes below this one have their bit set in a ballot.
__device__ inline int lanes_before(uint32_t ballot) { return __popc(ballot & ptx::lanemask_lt()); }

}   // namespace tile
