// Ends of values: registers whose values no later code reads, although the compiler cannot see that.
#pragma once

#include <cstdint>

namespace ptx {

// A register becomes free until it is written again. No instruction stands for this.
__device__ inline void forget(float &value) { asm volatile("" : "=f"(value)); }
__device__ inline void forget(uint32_t &value) { asm volatile("" : "=r"(value)); }

}   // namespace ptx
