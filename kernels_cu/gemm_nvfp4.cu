// gemm_nvfp4: matrix products of operands in NVFP4.
#include "kernel.cuh"
#include "op/gemm.cuh"

VARIANTS(tile, 64, 128, 256)

BLOCK_GEMM(UNIT, tile::Nvfp4, tile::Nvfp4, VARIANT_tile)
