// gemm_bf16_nvfp4: matrix products of A in bf16 and B in nvfp4.
#include "kernel.cuh"
#include "op/gemm.cuh"

VARIANTS(tile, 64, 256)

HALF_GEMM(UNIT, tile::Nvfp4, VARIANT_tile)
