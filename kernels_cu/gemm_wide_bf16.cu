// gemm_wide_bf16: matrix products of 33 to 64 rows, of operands in bf16.
#include "kernel.cuh"
#include "op/gemm_wide.cuh"

WIDE_GEMM(UNIT, __nv_bfloat16, tile::Bf16)
