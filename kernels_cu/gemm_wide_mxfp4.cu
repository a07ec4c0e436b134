// gemm_wide_mxfp4: matrix products with 17 to 64 rows, of operands in MXFP4.
#include "kernel.cuh"
#include "op/gemm_wide.cuh"

WIDE_BLOCK_GEMM(UNIT, tile::Mxfp4, tile::Mxfp4)
