// gemm_wide_bf16_mxfp4: matrix products with 17 to 64 rows, of A in bf16 and B in mxfp4.
#include "kernel.cuh"
#include "op/gemm_wide.cuh"

WIDE_HALF_GEMM(UNIT, tile::Mxfp4)
