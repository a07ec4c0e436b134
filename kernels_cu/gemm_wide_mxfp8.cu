// gemm_wide_mxfp8: matrix products with 17 to 64 rows, of operands in MXFP8.
#include "kernel.cuh"
#include "op/gemm_wide.cuh"

WIDE_BLOCK_GEMM(UNIT, tile::Mxfp8, tile::Mxfp8)
