// The identity registers of a thread.
#pragma once

#include <cstdint>

#include "../ptx/warp.cuh"

namespace op {

constexpr int identity_fields = 16;

// Writes this thread's identity registers to its own row of identity[blocks_z][blocks_y][blocks_x][threads][fields]:
// tid, ntid, ctaid and nctaid (x, y, z each), laneid, lanemask_eq, lanemask_lt, and the thread's linear index in its
// block.
__device__ inline void thread_identity(int32_t *identity, int blocks_x, int blocks_y) {
    const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    const int threads = blockDim.x * blockDim.y * blockDim.z;
    const size_t block = blockIdx.x + size_t(blocks_x) * (blockIdx.y + size_t(blocks_y) * blockIdx.z);
    const int fields[identity_fields] = {
        int(threadIdx.x), int(threadIdx.y),        int(threadIdx.z),        int(blockDim.x),
        int(blockDim.y),  int(blockDim.z),         int(blockIdx.x),         int(blockIdx.y),
        int(blockIdx.z),  int(gridDim.x),          int(gridDim.y),          int(gridDim.z),
        ptx::laneid(),    int(ptx::lanemask_eq()), int(ptx::lanemask_lt()), thread};
    int32_t *row = identity + (block * threads + thread) * identity_fields;
    for (int field = 0; field < identity_fields; ++field) row[field] = fields[field];
}

}   // namespace op
