// Exchanges inside a warp. Called by all 32 lanes.
#pragma once

#include <cstdint>

#include "target.cuh"

namespace ptx {

// The value of lane ^ `lane_mask`.
__device__ inline uint32_t shfl_sync_bfly_b32(uint32_t value, int lane_mask) {
    uint32_t result;
    asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=r"(result) : "r"(value), "r"(lane_mask));
    return result;
}

__device__ inline float shfl_sync_bfly_f32(float value, int lane_mask) {
    return __uint_as_float(shfl_sync_bfly_b32(__float_as_uint(value), lane_mask));
}

// The value of lane `source`.
__device__ inline uint32_t shfl_sync_idx_b32(uint32_t value, int source) {
    uint32_t result;
    asm volatile("shfl.sync.idx.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=r"(result) : "r"(value), "r"(source));
    return result;
}

// This block's place in the grid, read anew at every call, so that values computed from it are not kept in registers
// across iterations of a loop.
__device__ inline uint3 block() {
    uint3 place;
    asm volatile("mov.u32 %0, %%ctaid.x; mov.u32 %1, %%ctaid.y; mov.u32 %2, %%ctaid.z;"
                 : "=r"(place.x), "=r"(place.y), "=r"(place.z));
    return place;
}

__device__ inline int laneid() {
    int lane;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

// This lane's bit.
__device__ inline uint32_t lanemask_eq() {
    uint32_t mask;
    asm("mov.u32 %0, %%lanemask_eq;" : "=r"(mask));
    return mask;
}

// A bit for each lane below this one.
__device__ inline uint32_t lanemask_lt() {
    uint32_t mask;
    asm("mov.u32 %0, %%lanemask_lt;" : "=r"(mask));
    return mask;
}

// Whether any lane, or every lane, passes true; and a bit for each lane that does.
__device__ inline bool vote_sync_any(bool says) {
    int any;
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %1, 0; vote.sync.any.pred p, p, 0xffffffff; selp.s32 %0, 1, 0, p; }"
                 : "=r"(any)
                 : "r"(static_cast<int>(says)));
    return any;
}

__device__ inline bool vote_sync_all(bool says) {
    int all;
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %1, 0; vote.sync.all.pred p, p, 0xffffffff; selp.s32 %0, 1, 0, p; }"
                 : "=r"(all)
                 : "r"(static_cast<int>(says)));
    return all;
}

__device__ inline uint32_t vote_sync_ballot(bool says) {
    uint32_t lanes;
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %1, 0; vote.sync.ballot.b32 %0, p, 0xffffffff; }"
                 : "=r"(lanes)
                 : "r"(static_cast<int>(says)));
    return lanes;
}

// True in one lane, the same at every call. The compiler then emits bulk copies without a loop over lanes.
__device__ inline bool elect_sync() {
    if constexpr (has_elect) {
        int elected;
        asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.s32 %0, 1, 0, p; }" : "=r"(elected));
        return elected;
    } else {
        return laneid() == 0;
    }
}

// All lanes arrive; what any of them wrote to memory before is visible to all of them after.
__device__ inline void bar_warp_sync() { asm volatile("bar.warp.sync 0xffffffff;" ::: "memory"); }

}   // namespace ptx
