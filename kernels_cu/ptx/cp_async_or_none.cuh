// cp.async under a predicate that does not depend on the bytes.
#pragma once

#include <cstdint>

namespace ptx {

// cp_async_cg_16 if `copies`, else nothing. Without a branch: the predicate is the instruction's, so that the compiler
// may place copies between MMAs.
__device__ inline void cp_async_cg_16_or_none(bool copies, uint32_t shared_address, const void *global, bool present) {
    asm volatile(
        "{\n\t"
        ".reg .pred copies, absent;\n\t"
        "setp.ne.s32 copies, %2, 0;\n\t"
        "setp.eq.s32 absent, %3, 0;\n\t"
        "@copies cp.async.cg.shared.global [%0], [%1], 16, absent;\n\t"
        "}"
        :
        : "r"(shared_address), "l"(__cvta_generic_to_global(global)), "r"(int(copies)), "r"(int(present))
        : "memory");
}

}   // namespace ptx
