// dequantize_nvfp4_columns: values of e2m1 codes and ue4m3 scales of matrices whose blocks of 16 run down the columns.
#include "kernel.cuh"
#include "op/quantize_columns.cuh"

#define INSTANCE(dtype, Element)                                                                                       \
    KERNEL(dequantize_nvfp4_columns_##dtype, .threads = {op::columns_threads},                                         \
           .tile = {op::columns_tile, op::columns_warps * tile::nvfp4_block, 1},                                       \
           .min_blocks = op::dequantize_nvfp4_columns_blocks<Element>)                                                 \
    (const uint8_t *codes,      /* [outer, rows / 2, cols] */                                                          \
     const uint8_t *scales,     /* [outer, rows / 16, cols] */                                                         \
     const float *global_scale, /* [1] */                                                                              \
     Element *x,                /* [outer, rows, cols] */                                                              \
     int64_t outer, int64_t rows, int64_t cols) {                                                                      \
        const int64_t values = int64_t(blockIdx.z) * rows * cols; /* before this matrix */                             \
        op::with_columns(cols, [&](auto whole) {                                                                       \
            op::dequantize_nvfp4_columns<whole>(codes + values / 2, scales + values / 16, *global_scale, x + values,   \
                                                rows, cols);                                                           \
        });                                                                                                            \
    }

INSTANCE(f32, float)
INSTANCE(f16, __half)
INSTANCE(bf16, __nv_bfloat16)
