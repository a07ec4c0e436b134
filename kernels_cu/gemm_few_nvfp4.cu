// gemm_few_nvfp4: matrix products of few rows, of operands in NVFP4.
#include "kernel.cuh"
#include "op/gemm_small.cuh"

FEW_BLOCK_GEMM(UNIT, tile::Nvfp4, tile::Nvfp4)
