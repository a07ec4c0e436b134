// attention_mxfp8: attention on Q, K and V in MXFP8, P quantized to MXFP8 in registers.
#include "kernel.cuh"
#include "op/attention_blocks.cuh"

VARIANTS(dim, 32, 64, 128, 192, 256)

BLOCK_ATTENTION(JOIN(attention_mxfp8_dim, VARIANT_dim, ), tile::Mxfp8, tile::Mxfp8, VARIANT_dim, VARIANT_dim)
