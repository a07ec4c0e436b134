// cp.async: asynchronous copies from global to shared memory.
#pragma once

#include <cstdint>

namespace ptx {

// Starts copying 16 bytes; both addresses 16-byte aligned. If `present` is false, nothing is read and 16 zero bytes are
// written, so that the tail of a tile is defined. This thread sees the bytes after a wait that covers the group, other
// threads after a barrier behind it.
__device__ inline void cp_async_cg_16(uint32_t shared_address, const void *global, bool present) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(shared_address), "l"(__cvta_generic_to_global(global)), "r"(present ? 16 : 0)
                 : "memory");
}

// The same with a predicate for the instruction, which costs less where `present` is a comparison.
__device__ inline void cp_async_cg_16_if(bool present, uint32_t shared_address, const void *global) {
    asm volatile(
        "{\n\t"
        ".reg .pred absent;\n\t"
        "setp.eq.s32 absent, %2, 0;\n\t"
        "cp.async.cg.shared.global [%0], [%1], 16, absent;\n\t"
        "}"
        :
        : "r"(shared_address), "l"(__cvta_generic_to_global(global)), "r"(int(present))
        : "memory");
}

// Starts copying 4, 8 or 16 bytes, both addresses multiples of that, through the L1. The first `present` of them are
// read, the others become zeros.
template <int bytes>
__device__ inline void cp_async_ca(uint32_t shared_address, const void *global, int present) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                 :
                 : "r"(shared_address), "l"(__cvta_generic_to_global(global)), "n"(bytes), "r"(present)
                 : "memory");
}

// Closes the group of all copies that this thread started since the last one.
__device__ inline void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most the `pending` youngest groups of this thread are in flight. No barrier: other threads' copies may
// still be in flight.
template <int pending>
__device__ inline void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// As cp_async_cg_16, for a part of a run that is copied from begin to end soon: the L2 fetches the aligned 256 bytes
// around it from memory at once. A memory page that is read two lines at a time is opened half as often.
__device__ inline void cp_async_cg_16_of_run(uint32_t shared_address, const void *global, bool present) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;"
                 :
                 : "r"(shared_address), "l"(__cvta_generic_to_global(global)), "r"(present ? 16 : 0)
                 : "memory");
}

}   // namespace ptx
