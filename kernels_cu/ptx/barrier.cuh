// Barriers of a block.
#pragma once

namespace ptx {

// All threads of the block arrive; what any of them wrote to shared or global memory before is visible to all after.
__device__ inline void bar_sync() { asm volatile("bar.sync 0;" ::: "memory"); }

// The same; returns whether any thread of the block passes true.
__device__ inline bool bar_red_or(bool says) {
    int any;
    asm volatile("{ .reg .pred p, q; setp.ne.s32 p, %1, 0; bar.red.or.pred q, 0, p; selp.s32 %0, 1, 0, q; }"
                 : "=r"(any)
                 : "r"(static_cast<int>(says))
                 : "memory");
    return any;
}

}   // namespace ptx
