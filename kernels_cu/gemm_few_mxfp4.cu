// gemm_few_mxfp4: matrix products of few rows, of operands in MXFP4.
#include "kernel.cuh"
#include "op/gemm_small.cuh"

FEW_BLOCK_GEMM(UNIT, tile::Mxfp4, tile::Mxfp4)
