// Searches by the lanes of a warp.
#pragma once

#include <cstdint>

#include "../ptx/warp.cuh"

namespace tile {

// Of `items` items, item i with count(i) places, the one that has place `place` of all; `place` becomes its place in
// the item. Returns `items` if there are fewer places. Called by the whole warp, which looks at 32 items at once.
template <class Count>
__device__ inline int item_of_place(int &place, int items, Count &&count) {
    for (int first = 0; first < items; first += 32) {
        const int lane = ptx::laneid(), item = first + lane, own = item < items ? count(item) : 0;
        int end = own;   // of this lane's places, from those of item `first` on
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int before = ptx::shfl_sync_idx_b32(end, lane - step & 31);
            if (lane >= step) end += before;
        }
        const uint32_t behind = ptx::vote_sync_ballot(place < end);
        if (behind != 0) {
            const int found = __ffs(behind) - 1;
            place -= ptx::shfl_sync_idx_b32(end - own, found);
            return first + found;
        }
        place -= ptx::shfl_sync_idx_b32(end, 31);
    }
    return items;
}

}   // namespace tile
