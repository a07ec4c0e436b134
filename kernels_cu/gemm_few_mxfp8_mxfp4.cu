// gemm_few_mxfp8_mxfp4: matrix products of few rows, of A in MXFP8 and B in MXFP4.
#include "kernel.cuh"
#include "op/gemm_small.cuh"

FEW_BLOCK_GEMM(UNIT, tile::Mxfp8, tile::Mxfp4)
