// gemm_few_bf16_mxfp4: matrix products of few rows, of A in bf16 and B in mxfp4.
#include "kernel.cuh"
#include "op/gemm_small.cuh"

FEW_HALF_GEMM(UNIT, tile::Mxfp4)
