// gemm_few_bf16: matrix products of few rows, of operands in bf16 or f16.
#include "kernel.cuh"
#include "op/gemm_small.cuh"

#define INSTANCE(suffix, Element, Format)                                                                              \
    FEW_GEMM(ENTRY(suffix), Format, Format)                                                                            \
    PARAMETERS_IN_16_BITS(Element) {                                                                                   \
        op::gemm_of_few_rows<Format, Format>(shared<op::FewShared<Format, Format>>(), HALF_ROWS(a, a_batch),           \
                                             HALF_ROWS(b, b_group), GEMM_OPTIONS(nullptr, nullptr));                   \
    }

INSTANCE(_bf16, __nv_bfloat16, tile::Bf16)
INSTANCE(_f16, __half, op::Float16)
