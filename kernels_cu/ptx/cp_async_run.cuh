// cp.async of lines of long runs of bytes.
#pragma once

#include <cstdint>

namespace ptx {

// As cp_async_cg_16, for a part of a run that is copied from begin to end soon: the L2 fetches the aligned 256 bytes
// around it from memory at once. A memory page that is read two lines at a time is opened half as often.
__device__ inline void cp_async_cg_16_of_run(uint32_t shared_address, const void *global, bool present) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;"
                 :
                 : "r"(shared_address), "l"(__cvta_generic_to_global(global)), "r"(present ? 16 : 0)
                 : "memory");
}

}   // namespace ptx
