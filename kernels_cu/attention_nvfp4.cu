// attention_nvfp4: attention on Q, K and V in NVFP4, P quantized to NVFP4 in registers.
#include "kernel.cuh"
#include "op/attention_blocks.cuh"

VARIANTS(dim dim_v, 64 64, 128 128, 192 128, 192 192, 256 256)

// Twelve warps of NVFP4 lack registers for two tiles of P (static model: 1261 TFLOPS overlapped, 1361 without).
template <>
constexpr bool op::BlockTiling<tile::Nvfp4, tile::Nvfp4, 128, 128>::overlaps = false;

BLOCK_ATTENTION(UNIT, tile::Nvfp4, tile::Nvfp4, VARIANT_dim, VARIANT_dim_v)
