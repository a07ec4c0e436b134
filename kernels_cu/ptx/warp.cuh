// Exchanges inside a warp. Called by all 32 lanes.
#pragma once

#include <cstdint>

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

// Whether `predicate` holds in any lane.
__device__ inline bool vote_sync_any(bool predicate) {
    uint32_t result;
    asm volatile("{\n"
                 "  .reg .pred in, out;\n"
                 "  setp.ne.u32 in, %1, 0;\n"
                 "  vote.sync.any.pred out, in, 0xffffffff;\n"
                 "  selp.u32 %0, 1, 0, out;\n"
                 "}"
                 : "=r"(result)
                 : "r"(static_cast<uint32_t>(predicate)));
    return result;
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

}  // namespace ptx
