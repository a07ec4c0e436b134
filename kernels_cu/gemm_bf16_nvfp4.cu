// gemm_bf16_nvfp4: matrix products of A in bf16 and B in nvfp4.
#include "kernel.cuh"
#include "op/gemm.cuh"

VARIANTS(tile, 64, 256)

using Core = op::Core<tile::Bf16, tile::Nvfp4, VARIANT_tile>;

// The wide tile spills what the epilogue needs before the loop over slices, and reloads it behind.
KERNEL(UNIT, .threads = {Core::threads}, .shared_bytes = sizeof(Core::Shared), .tile = {Core::cols, Core::rows, 1},
       .min_blocks = Core::blocks, .spill_bytes = VARIANT_tile == 256 ? 48 : 0)
GEMM_OF_BF16_AND_BLOCKS(op::gemm<Core>)
