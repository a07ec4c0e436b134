// dequantize_mxfp8_e5m2_columns: values of e5m2 codes and ue8m0 scales of matrices whose blocks of 32 run down the columns.
#include "kernel.cuh"
#include "op/quantize_columns.cuh"

#define INSTANCE(dtype, Element)                                                                             \
    KERNEL(dequantize_mxfp8_e5m2_columns_##dtype, .threads = {op::columns_threads},                          \
           .tile = {op::columns_tile, op::columns_warps * tile::mx_block, 1},                                \
           .min_blocks = op::dequantize_columns_blocks<Element>)                                             \
    (const uint8_t *codes,    /* [outer, rows * 8 / 8, cols] */                                              \
     const uint8_t *scales,   /* [outer, rows / 32, cols] */                                                 \
     Element *x,              /* [outer, rows, cols] */                                                      \
     int64_t outer, int64_t rows, int64_t cols) {                                                            \
        const int64_t values = int64_t(blockIdx.z) * rows * cols;   /* before this matrix */                 \
        op::with_columns(cols, [&](auto whole) {                                                             \
            op::dequantize_mx_columns<tile::E5m2, whole>(codes + values * 8 / 8, scales + values / 32, x + values, \
                rows, cols);                                                                                 \
        });                                                                                                  \
    }

INSTANCE(f32, float)
INSTANCE(f16, __half)
INSTANCE(bf16, __nv_bfloat16)
