// Teams of lanes that share an item.
#pragma once

#include <cstdint>

#include "../ptx/warp.cuh"

namespace tile {

// Teams of `size` lanes, a power of two, of a warp. Neighboring lanes belong to neighboring items.
struct Team {
    int size, log_items;   // of a warp

    __device__ explicit Team(int size) : size(size), log_items(__clz(size) - 26) {}
    // This lane's place in its team.
    __device__ int member() const { return ptx::laneid() >> log_items; }
    // The item of a thread.
    template <class Index>
    __device__ Index item(Index thread) const {
        return (thread >> 5 << log_items) + (thread & ((1 << log_items) - 1));
    }
    // The value of member `member` ^ `distance`, and that of a member.
    __device__ float partner(float value, int distance) const {
        return ptx::shfl_sync_bfly_f32(value, distance << log_items);
    }
    __device__ float of(float value, int member) const {
        const int lane = (member << log_items) + (ptx::laneid() & ((1 << log_items) - 1));
        return __uint_as_float(ptx::shfl_sync_idx_b32(__float_as_uint(value), lane));
    }
};

}   // namespace tile
