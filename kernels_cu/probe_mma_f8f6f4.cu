// probe_mma_f8f6f4: which elements mma.sync kind::f8f6f4 multiplies, and where their product goes.
#include "kernel.cuh"
#include "op/probe_f8f6f4.cuh"

KERNEL(probe_mma_f8f6f4, .threads = {32}, .tile = {1})
(int *meets,   // [elements_a, 32, 4]
 int format_a, int format_b, int in_f16, int elements_a) {
    op::probe_f8f6f4(meets + blockIdx.x * 128, format_a, format_b, in_f16 != 0, blockIdx.x);
}
