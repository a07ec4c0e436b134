// attention_nvfp4_mxfp8: attention on Q and K in NVFP4 and V in MXFP8, P quantized to MXFP8 in registers.
#include "kernel.cuh"
#include "op/attention_blocks.cuh"

VARIANTS(dim dim_v, 64 64, 128 128, 192 128, 192 192, 256 256)

// Twelve warps that hold 192 columns of Q spill more registers than others; a plain tile reloads at most five.
template <>
constexpr int op::BlockTiling<tile::Nvfp4, tile::Mxfp8, 192, 128>::spill_bytes = 192;
template <>
constexpr int op::BlockTiling<tile::Nvfp4, tile::Mxfp8, 256, 256>::spill_bytes = 144;

BLOCK_ATTENTION(tile::Nvfp4, tile::Mxfp8)
