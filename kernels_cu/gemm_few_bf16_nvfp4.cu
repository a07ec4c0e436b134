// gemm_few_bf16_nvfp4: matrix products of few rows, of A in bf16 and B in nvfp4.
#include "kernel.cuh"
#include "op/gemm_small.cuh"

FEW_HALF_GEMM(UNIT, tile::Nvfp4)
