// A search by the lanes of a warp.
#pragma once

#include <cstdint>

#include "../ptx/warp.cuh"

namespace tile {

// The last of `count` numbers for which holds(number) is true, where it is true up to some number and false behind it;
// 0 if it is true for none. All lanes of a warp call it with the same arguments and try 32 numbers at a time: a search
// by halves would load one number after the other.
template <class Holds>
__device__ inline int last_that_holds(int count, Holds &&holds) {
    int first = 0;   // the last number is among `count` from here on
    while (true) {
        const int step = (count + 31) / 32, offset = ptx::laneid() * step;
        const int found = __popc(ptx::vote_sync_ballot(offset < count && holds(first + offset)));
        const int begin = max(found - 1, 0) * step;
        first += begin;
        if (step <= 1) return first;
        count = min(step, count - begin);
    }
}

}   // namespace tile
