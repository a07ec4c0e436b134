// attention_mxfp4_mxfp8: attention on Q and K in MXFP4 and V in MXFP8, P quantized to MXFP8 in registers.
#include "kernel.cuh"
#include "op/attention_blocks.cuh"

VARIANTS(dim dim_v, 64 64, 128 128, 192 128, 192 192, 256 256)

BLOCK_ATTENTION(tile::Mxfp4, tile::Mxfp8)
