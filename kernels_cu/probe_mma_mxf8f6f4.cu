// probe_mma_mxf8f6f4: which elements and scales mma.sync kind::mxf8f6f4 multiplies, and where their product goes.
#include "kernel.cuh"
#include "op/probe.cuh"

KERNEL(probe_mma_mxf8f6f4, .threads = {32}, .tile = {1})
(int *meets,      // [elements_a, 32, 4]
 int *scales_a,   // [bytes, 2, elements_a] or null
 int *scales_b,   // [bytes, 4, elements_b] or null
 int format_a, int format_b, int elements_a, int bytes, int elements_b) {
    op::probe_mxf8f6f4(meets, scales_a, scales_b, format_a, format_b, blockIdx.x);
}
