// gemm_few_bf16: matrix products of few rows, of operands in bf16 or f16.
#include "kernel.cuh"
#include "op/gemm_small.cuh"

FEW_GEMM_IN_16_BITS(ENTRY(_bf16), __nv_bfloat16, tile::Bf16)
FEW_GEMM_IN_16_BITS(ENTRY(_f16), __half, op::Float16)
