// gemm_bf16_mxfp8: matrix products of A in bf16 and B in mxfp8.
#include "kernel.cuh"
#include "op/gemm.cuh"

VARIANTS(tile, 64, 256)

HALF_GEMM(UNIT, tile::Mxfp8, VARIANT_tile)
