// gemm_wide_bf16_mxfp8: matrix products with 17 to 64 rows, of A in bf16 and B in mxfp8.
#include "kernel.cuh"
#include "op/gemm_wide.cuh"

WIDE_HALF_GEMM(UNIT, tile::Mxfp8)
