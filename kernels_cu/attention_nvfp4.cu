// attention_nvfp4: attention on Q, K and V in NVFP4, P quantized to NVFP4 in registers.
#include "kernel.cuh"
#include "op/attention_blocks.cuh"

VARIANTS(dim dim_v, 64 64, 128 128, 192 128, 192 192, 256 256)

BLOCK_ATTENTION(tile::Nvfp4, tile::Nvfp4)
