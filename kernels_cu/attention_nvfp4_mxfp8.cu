// attention_nvfp4_mxfp8: attention on Q and K in NVFP4 and V in MXFP8, P quantized to MXFP8 in registers.
#include "kernel.cuh"
#include "op/attention_blocks.cuh"

VARIANTS(dim, 64, 128, 192, 256)

BLOCK_ATTENTION(JOIN(attention_nvfp4_mxfp8_dim, VARIANT_dim, ), tile::Nvfp4, tile::Mxfp8, VARIANT_dim, VARIANT_dim)
