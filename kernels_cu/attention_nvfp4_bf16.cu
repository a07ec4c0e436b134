// attention_nvfp4_bf16: attention on Q and K in NVFP4 and V in bf16, P rounded to bf16 in registers.
#include "kernel.cuh"
#include "op/attention_blocks.cuh"

VARIANTS(dim dim_v, 64 64, 128 128, 192 128, 192 192, 256 256)

BLOCK_ATTENTION(tile::Nvfp4, tile::Bf16)
