// probe_mma_mxf8f6f4: which elements and scales mma.sync kind::mxf8f6f4 multiplies, and where their product goes.
#include "kernel.cuh"
#include "op/probe.cuh"

KERNEL(probe_mma_mxf8f6f4, .threads = {32}, .tile = {1})
(int *meets,      // [elements_a, 32, 4]
 int *scales_a,   // [bytes, 2, registers_a] or null
 int *scales_b,   // [bytes, 4, registers_b] or null
 int format_a, int format_b, int elements_a, int bytes, int registers_a, int registers_b) {
    op::probe_mxf8f6f4(meets + blockIdx.x * 128, scales_a, scales_b, format_a, format_b, blockIdx.x);
}
