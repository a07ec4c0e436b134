// gemm_bf16_mxfp4: matrix products of A in bf16 and B in mxfp4.
#include "kernel.cuh"
#include "op/gemm.cuh"

VARIANTS(tile, 64, 256)

HALF_GEMM(UNIT, tile::Mxfp4, VARIANT_tile)
