// gemm_wide_bf16: matrix products with 17 to 64 rows, of operands in bf16 or f16.
#include "kernel.cuh"
#include "op/gemm_wide.cuh"

WIDE_GEMM_IN_16_BITS(ENTRY(_bf16), __nv_bfloat16, tile::Bf16)
WIDE_GEMM_IN_16_BITS(ENTRY(_f16), __half, op::Float16)
