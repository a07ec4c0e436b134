// probe_mma_registers: the result of mma.sync for registers that are given bit by bit.
#include "kernel.cuh"
#include "op/probe_registers.cuh"

KERNEL(probe_mma_registers, .threads = {32}, .tile = {1})
(const uint32_t *a,        // [trials, 32, 4]
 const uint32_t *b,        // [trials, 32, 2]
 const uint32_t *c,        // [trials, 32, 4]
 const uint32_t *scales,   // [trials, 32, 2]
 uint32_t *d,              // [trials, 32, 4]
 int form, int trials) {
    op::probe_registers({a, b, c, scales, d}, form, blockIdx.x);
}
