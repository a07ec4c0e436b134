// mma_rate_mxf8f6f4_e4m3: chains of mma.m16n8k32 of kind::mxf8f6f4 on e4m3, on registers alone.
#include "kernel.cuh"
#include "op/mma_rate.cuh"

KERNEL(mma_rate_mxf8f6f4_e4m3, .threads = {op::mma_rate_threads}, .shared_bytes = sizeof(op::MmaRateShared),
       .min_blocks = 2)
(const uint8_t *a,   // [2, 16, 32]
 const uint8_t *b,   // [4, 8, 32]
 float *c,           // [blocks, warps, 8, 16, 8]
 int steps, uint32_t flip, int blocks, int warps) {
    op::mma_rate<op::Mxf8f6f4Mma<ptx::E4m3>>(shared<op::MmaRateShared>(), a, b,
                                             c + size_t(blockIdx.x) * warps * op::mma_rate_chains * 128, steps, flip);
}
