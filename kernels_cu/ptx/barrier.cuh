// Barriers of a block.
#pragma once

namespace ptx {

// All threads of the block arrive; what any of them wrote to shared or global memory before is visible to all after.
__device__ inline void bar_sync() { asm volatile("bar.sync 0;" ::: "memory"); }

}  // namespace ptx
