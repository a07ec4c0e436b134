// attention_mxfp4: attention on Q, K and V in MXFP4, P quantized to MXFP4 in registers.
#include "kernel.cuh"
#include "op/attention_blocks.cuh"

VARIANTS(dim, 64, 128, 192, 256)

BLOCK_ATTENTION(JOIN(attention_mxfp4_dim, VARIANT_dim, ), tile::Mxfp4, tile::Mxfp4, VARIANT_dim, VARIANT_dim)
