// gemm_wide_nvfp4: matrix products with 17 to 64 rows, of operands in NVFP4.
#include "kernel.cuh"
#include "op/gemm_wide.cuh"

WIDE_BLOCK_GEMM(UNIT, tile::Nvfp4, tile::Nvfp4)
