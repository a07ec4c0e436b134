// gemm_few_nvfp4: matrix products of few rows, of operands in NVFP4.
#include "kernel.cuh"
#include "op/gemm_small.cuh"

VARIANTS(most, 16)

FEW_BLOCK_GEMM(UNIT, tile::Nvfp4, tile::Nvfp4, VARIANT_most / 16)
