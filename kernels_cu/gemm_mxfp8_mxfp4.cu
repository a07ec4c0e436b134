// gemm_mxfp8_mxfp4: matrix products of A in MXFP8 and B in MXFP4.
#include "kernel.cuh"
#include "op/gemm.cuh"

VARIANTS(tile, 64, 128, 256)

BLOCK_GEMM(UNIT, tile::Mxfp8, tile::Mxfp4, VARIANT_tile)
