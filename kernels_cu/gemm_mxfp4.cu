// gemm_mxfp4: matrix products of operands in MXFP4.
#include "kernel.cuh"
#include "op/gemm.cuh"

VARIANTS(tile, 64, 128, 256)

BLOCK_GEMM(UNIT, tile::Mxfp4, tile::Mxfp4, VARIANT_tile)
