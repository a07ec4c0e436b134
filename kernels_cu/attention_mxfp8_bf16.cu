// attention_mxfp8_bf16: attention on Q and K in MXFP8 and V in bf16, P rounded to bf16 in registers.
#include "kernel.cuh"
#include "op/attention_blocks.cuh"

VARIANTS(dim, 32, 64, 128, 192, 256)

BLOCK_ATTENTION(JOIN(attention_mxfp8_bf16_dim, VARIANT_dim, ), tile::Mxfp8, tile::Bf16, VARIANT_dim, VARIANT_dim)
