// attention_nvfp4_bf16: attention on Q and K in NVFP4 and V in bf16, P rounded to bf16 in registers.
#include "kernel.cuh"
#include "op/attention_blocks.cuh"

VARIANTS(dim, 64, 128, 192, 256)

BLOCK_ATTENTION(JOIN(attention_nvfp4_bf16_dim, VARIANT_dim, ), tile::Nvfp4, tile::Bf16, VARIANT_dim, VARIANT_dim)
