// mma_rate_mxf4: chains of mma.m16n8k64 of kind::mxf4 on packed e2m1, on registers alone.
#include "kernel.cuh"
#include "op/mma_rate.cuh"

KERNEL(mma_rate_mxf4, .threads = {op::mma_rate_threads}, .shared_bytes = sizeof(op::MmaRateShared), .min_blocks = 2)
(const uint8_t *a,   // [2, 16, 32]
 const uint8_t *b,   // [4, 8, 32]
 float *c,           // [blocks, warps, 8, 16, 8]
 int steps, uint32_t flip, int blocks, int warps) {
    op::mma_rate<op::Mxf4Mma>(shared<op::MmaRateShared>(), a, b,
                              c + size_t(blockIdx.x) * warps * op::mma_rate_chains * 128, steps, flip);
}
