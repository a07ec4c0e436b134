// gemm_mxfp8: matrix products of operands in MXFP8.
#include "kernel.cuh"
#include "op/gemm.cuh"

VARIANTS(tile, 64, 128, 256)

BLOCK_GEMM(UNIT, tile::Mxfp8, tile::Mxfp8, VARIANT_tile)
