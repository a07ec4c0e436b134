// gemm_few_mxfp8: matrix products of few rows, of operands in MXFP8.
#include "kernel.cuh"
#include "op/gemm_small.cuh"

FEW_BLOCK_GEMM(UNIT, tile::Mxfp8, tile::Mxfp8)
