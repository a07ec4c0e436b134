// gemm_few_mxfp8: matrix products of few rows, of operands in MXFP8.
#include "kernel.cuh"
#include "op/gemm_small.cuh"

VARIANTS(most, 16)

FEW_BLOCK_GEMM(UNIT, tile::Mxfp8, tile::Mxfp8, VARIANT_most / 16)
