// probe_mma_mxf4nvf4: which elements and scales mma.sync kind::mxf4nvf4 multiplies, and where their product goes.
#include "kernel.cuh"
#include "op/probe.cuh"

KERNEL(probe_mma_mxf4nvf4, .threads = {32}, .tile = {1})
(int *meets,      // [elements_a, 32, 4]
 int *scales_a,   // [bytes, 2, registers_a]
 int *scales_b,   // [bytes, 4, registers_b]
 int elements_a, int bytes, int registers_a, int registers_b) {
    op::probe_elements(op::Mxf4nvf4{}, meets + blockIdx.x * 128, blockIdx.x);
    op::probe_scales(op::Mxf4nvf4{}, scales_a, scales_b, blockIdx.x);
}
