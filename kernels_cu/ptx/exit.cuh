// The end of a thread ahead of the end of its entry.
#pragma once

namespace ptx {

// Ends this thread. No path leads from here to the code behind the call.
__device__ inline void exit() { asm volatile("exit;" ::: "memory"); }

}   // namespace ptx
