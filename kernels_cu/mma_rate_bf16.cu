// mma_rate_bf16: chains of mma.m16n8k16 of bf16 on registers alone.
#include <cuda_bf16.h>

#include "kernel.cuh"
#include "op/mma_rate.cuh"

KERNEL(mma_rate_bf16, .threads = {op::mma_rate_threads}, .shared_bytes = sizeof(op::MmaRateShared), .min_blocks = 2)
(const __nv_bfloat16 *a,   // [2, 16, 16]
 const __nv_bfloat16 *b,   // [4, 8, 16]
 float *c,                 // [blocks, warps, 8, 16, 8]
 int steps, uint32_t flip, int blocks, int warps) {
    op::mma_rate<op::Bf16Mma>(shared<op::MmaRateShared>(), a, b,
                              c + size_t(blockIdx.x) * warps * op::mma_rate_chains * 128, steps, flip);
}
