// probe_mma_plain: which elements mma.sync multiplies in forms without a kind, and where their product goes.
#include "kernel.cuh"
#include "op/probe.cuh"

KERNEL(probe_mma_plain, .threads = {32}, .tile = {1})
(int *meets,   // [elements_a, 32, 4]
 int form, int elements_a) {
    op::probe_plain(meets + blockIdx.x * 128, form, blockIdx.x);
}
