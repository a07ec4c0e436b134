// cp.async of bytes that are read once: the L2 gives up their lines before others. In machine code the policy is a
// constant.
#pragma once

#include <cstdint>

namespace ptx {

// cp_async_cg_16 of such bytes.
__device__ inline void cp_async_cg_16_once(uint32_t shared_address, const void *global) {
    asm volatile(
        "{\n\t"
        ".reg .b64 policy;\n\t"
        "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n\t"
        "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, policy;\n\t"
        "}"
        :
        : "r"(shared_address), "l"(__cvta_generic_to_global(global))
        : "memory");
}
__device__ inline void cp_async_cg_16_once(uint32_t shared_address, const void *global, bool present) {
    asm volatile(
        "{\n\t"
        ".reg .b64 policy;\n\t"
        "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n\t"
        "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, policy;\n\t"
        "}"
        :
        : "r"(shared_address), "l"(__cvta_generic_to_global(global)), "r"(present ? 16 : 0)
        : "memory");
}

// cp_async_cg_16_of_run of such bytes.
__device__ inline void cp_async_cg_16_of_run_once(uint32_t shared_address, const void *global, bool present) {
    asm volatile(
        "{\n\t"
        ".reg .b64 policy;\n\t"
        "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n\t"
        "cp.async.cg.shared.global.L2::cache_hint.L2::256B [%0], [%1], 16, %2, policy;\n\t"
        "}"
        :
        : "r"(shared_address), "l"(__cvta_generic_to_global(global)), "r"(present ? 16 : 0)
        : "memory");
}

}   // namespace ptx
