// gemm_few_bf16: matrix products of few rows, of operands in bf16 or f16.
#include "kernel.cuh"
#include "op/gemm_small.cuh"

#define INSTANCE(suffix, Element, Format)                                                                              \
    FEW_GEMM(ENTRY(suffix), Format, Format) GEMM_IN_16_BITS(Element, op::gemm_of_few_rows<Format, Format>)

INSTANCE(_bf16, __nv_bfloat16, tile::Bf16)
INSTANCE(_f16, __half, op::Float16)
