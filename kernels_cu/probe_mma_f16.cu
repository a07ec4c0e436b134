// probe_mma_f16: which elements mma.sync m16n8k16 of f16 multiplies, and where their product goes.
#include "kernel.cuh"
#include "op/probe.cuh"

KERNEL(probe_mma_f16, .threads = {32}, .tile = {1})
(int *meets,   // [elements_a, 32, 4]
 int elements_a) {
    op::probe_elements(op::F16{}, meets + blockIdx.x * 128, blockIdx.x);
}
