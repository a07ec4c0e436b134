// gemm_bf16: matrix products of operands in bf16 or f16.
#include "kernel.cuh"
#include "op/gemm.cuh"
#include "op/gemm_narrow.cuh"

VARIANTS(tile, 64, 128)

#define INSTANCE(suffix, Element, Format)                                                                              \
    using Core##suffix = op::Core<Format, Format, VARIANT_tile>;                                                       \
    TILE_GEMM(ENTRY(suffix), Core##suffix) GEMM_IN_16_BITS(Element, op::gemm_in_16_bits<Core##suffix>)

INSTANCE(_bf16, __nv_bfloat16, tile::Bf16)
INSTANCE(_f16, __half, op::Float16)
