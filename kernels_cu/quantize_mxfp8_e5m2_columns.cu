// quantize_mxfp8_e5m2_columns: e5m2 codes and ue8m0 scales of matrices whose blocks of 32 run down the columns.
#include "kernel.cuh"
#include "op/quantize_columns.cuh"

#define INSTANCE(dtype, Element)                                                                             \
    KERNEL(quantize_mxfp8_e5m2_columns_##dtype, .threads = {op::columns_threads},                            \
           .tile = {op::columns_tile, op::columns_warps * tile::mx_block, 1},                                \
           .min_blocks = 2)   /* eight bits a code need more registers */                                \
    (const Element *x,   /* [outer, rows, cols] */                                                           \
     uint8_t *codes,     /* [outer, rows * 8 / 8, cols] */                                                   \
     uint8_t *scales,    /* [outer, rows / 32, cols] */                                                      \
     int rule, int64_t outer, int64_t rows, int64_t cols) {                                                  \
        const int64_t values = int64_t(blockIdx.z) * rows * cols;   /* before this matrix */                 \
        op::with_columns(cols, [&](auto whole) {                                                             \
            op::quantize_mx_columns<tile::E5m2, whole>(x + values, codes + values * 8 / 8, scales + values / 32, \
                rows, cols, tile::ScaleRule(rule));                                                          \
        });                                                                                                  \
    }

INSTANCE(f32, float)
INSTANCE(f16, __half)
INSTANCE(bf16, __nv_bfloat16)
