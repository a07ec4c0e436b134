// quantize_mxfp4: e2m1 codes and ue8m0 scales of float32, float16 or bfloat16 values, 32 to a scale.
#include "kernel.cuh"
#include "op/quantize.cuh"

#define INSTANCE(dtype, Element)                                                                             \
    KERNEL(quantize_mxfp4_##dtype, .threads = {op::quantize_threads},                                        \
           .tile = {op::quantize_tile<Element>}, .min_blocks = op::quantize_blocks)                          \
    (const Element *x,   /* [rows, cols] */                                                                  \
     uint32_t *codes,    /* [rows, cols * 4 / 8] bytes */                                                    \
     uint8_t *scales,    /* [rows, cols / 32] */                                                             \
     int rule, int64_t rows, int64_t cols) {                                                                 \
        op::quantize_mx<tile::E2m1>(x, codes, scales, rows *cols, tile::ScaleRule(rule));                      \
    }

INSTANCE(f32, float)
INSTANCE(f16, __half)
INSTANCE(bf16, __nv_bfloat16)
