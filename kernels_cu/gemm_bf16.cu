// gemm_bf16: matrix products of operands in bf16 or f16.
#include "kernel.cuh"
#include "op/gemm.cuh"

VARIANTS(tile, 64, 128, 256)

template <class Element>
using Core = op::Core16<Element, VARIANT_tile>;

#define INSTANCE(suffix, Element)                                                                                       \
    KERNEL(JOIN(gemm_bf16_tile, VARIANT_tile, suffix), .threads = {Core<Element>::threads},                             \
           .shared_bytes = sizeof(Core<Element>::Shared), .tile = {Core<Element>::cols, Core<Element>::rows, 1},        \
           .min_blocks = Core<Element>::blocks)                                                                         \
    (const Element *a,   /* [batch, tokens, depth] */                                                                   \
     const Element *b,   /* [groups, cols, depth] */                                                                    \
     GEMM_ARRAYS, GEMM_SCALARS, int batch, int tokens, int depth, int groups, int cols, GEMM_AXES, long long a_batch,   \
     long long a_row, long long b_group, long long b_row, GEMM_STRIDES) {                                               \
        const op::OperandRows rows_a = {reinterpret_cast<const uint8_t *>(a), 2 * a_batch, 2 * a_row, 2 * depth};       \
        const op::OperandRows rows_b = {reinterpret_cast<const uint8_t *>(b), 2 * b_group, 2 * b_row, 2 * depth};       \
        op::gemm<Core<Element>>(shared<typename Core<Element>::Shared>(), rows_a, rows_b,                               \
                                GEMM_OPTIONS(nullptr, nullptr, depth));                                                 \
    }

INSTANCE(_bf16, __nv_bfloat16)
INSTANCE(_f16, __half)
