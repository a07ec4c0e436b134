// quantize_nvfp4_columns: e2m1 codes and ue4m3 scales of matrices whose blocks of 16 run down the columns.
#include "kernel.cuh"
#include "op/quantize_columns.cuh"

#define INSTANCE(dtype, Element)                                                                                       \
    KERNEL(quantize_nvfp4_columns_##dtype, .threads = {op::columns_threads},                                           \
           .tile = {op::columns_tile, op::columns_warps * tile::nvfp4_block, 1},                                       \
           .min_blocks = op::quantize_columns_blocks<Element>)                                                         \
    (const Element *x,          /* [outer, rows, cols] */                                                              \
     const float *global_scale, /* [1] */                                                                              \
     uint8_t *codes,            /* [outer, rows / 2, cols] */                                                          \
     uint8_t *scales,           /* [outer, rows / 16, cols], or in tiles */                                            \
     int rule, int swizzled, int64_t outer, int64_t rows, int64_t cols, int64_t scale_outer, int64_t scale_rows,       \
     int64_t scale_cols) {                                                                                             \
        const op::ColumnScales target{                                                                                 \
            scales, swizzled != 0, {scale_outer, scale_rows, scale_cols}, outer, rows, cols};                          \
        op::with_columns(cols, [&](auto whole) {                                                                       \
            tile::with_nvfp4_rule(rule, [&](auto better_of_two) {                                                      \
                op::quantize_nvfp4_columns<better_of_two, whole>(x, *global_scale, codes, target);                     \
            });                                                                                                        \
        });                                                                                                            \
    }

INSTANCE(f32, float)
INSTANCE(f16, __half)
INSTANCE(bf16, __nv_bfloat16)
