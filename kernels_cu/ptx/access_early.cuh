// Predicated loads that stay behind griddepcontrol_wait(): the assembler moves loads with .nc to the front of it.
#pragma once

#include <cstdint>

namespace ptx {

// 16 bytes at a multiple of 16; zeros unless `present`. One predicated instruction, as ld_global_nc_16().
__device__ inline void ld_global_16(uint32_t (&words)[4], const void *global, bool present) {
    asm volatile(
        "{ .reg .pred p; setp.ne.s32 p, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;\n"
        "@p ld.global.v4.u32 {%0, %1, %2, %3}, [%4]; }"
        : "=&r"(words[0]), "=&r"(words[1]), "=&r"(words[2]), "=&r"(words[3])
        : "l"(__cvta_generic_to_global(global)), "r"(int(present))
        : "memory");
}

// The same from shared or from global memory.
__device__ inline void ld_16(uint32_t (&words)[4], const void *address, bool present) {
    asm volatile(
        "{ .reg .pred p; setp.ne.s32 p, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;\n"
        "@p ld.v4.u32 {%0, %1, %2, %3}, [%4]; }"
        : "=&r"(words[0]), "=&r"(words[1]), "=&r"(words[2]), "=&r"(words[3])
        : "l"(address), "r"(int(present))
        : "memory");
}

}   // namespace ptx
