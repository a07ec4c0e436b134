// quantize_nvfp4: e2m1 codes and ue4m3 scales of float32, float16 or bfloat16 values, 16 to a scale, under a global
// scale.
#include "kernel.cuh"
#include "op/quantize.cuh"

#define INSTANCE(dtype, Element)                                                                                       \
    KERNEL(quantize_nvfp4_##dtype, .threads = {op::quantize_threads}, .tile = {op::quantize_nvfp4_tile<Element>},      \
           .min_blocks = op::quantize_nvfp4_blocks<Element>)                                                           \
    (const Element *x,          /* [rows, cols] */                                                                     \
     const float *global_scale, /* [1] */                                                                              \
     uint32_t *codes,           /* [rows, cols / 2] bytes */                                                           \
     uint8_t *scales,           /* [rows, cols / 16], or in tiles */                                                   \
     int rule, int swizzled, int64_t rows, int64_t cols, int64_t scale_rows, int64_t scale_cols) {                     \
        op::with_scales(scales, swizzled, scale_rows * scale_cols, rows, cols / 16, [&](const auto &target) {          \
            tile::with_nvfp4_rule(rule, [&](auto better_of_two) {                                                      \
                op::quantize_nvfp4<better_of_two>(x, *global_scale, codes, target, rows * cols);                       \
            });                                                                                                        \
        });                                                                                                            \
    }

INSTANCE(f32, float)
INSTANCE(f16, __half)
INSTANCE(bf16, __nv_bfloat16)
