// attention_nvfp4: attention on Q, K and V in NVFP4, P quantized to NVFP4 in registers.
#include "kernel.cuh"
#include "op/attention_blocks.cuh"

VARIANTS(dim, 64, 128, 192, 256)

BLOCK_ATTENTION(JOIN(attention_nvfp4_dim, VARIANT_dim, ), tile::Nvfp4, tile::Nvfp4, VARIANT_dim, VARIANT_dim)
