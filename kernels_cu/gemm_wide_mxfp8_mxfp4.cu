// gemm_wide_mxfp8_mxfp4: matrix products with 17 to 64 rows, of A in MXFP8 and B in MXFP4.
#include "kernel.cuh"
#include "op/gemm_wide.cuh"

WIDE_BLOCK_GEMM(UNIT, tile::Mxfp8, tile::Mxfp4)
