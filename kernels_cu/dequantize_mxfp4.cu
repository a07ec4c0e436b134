// dequantize_mxfp4: float32, float16 or bfloat16 values of e2m1 codes under ue8m0 scales, 32 to a scale.
#include "kernel.cuh"
#include "op/quantize.cuh"

#define INSTANCE(dtype, Element)                                                                             \
    KERNEL(dequantize_mxfp4_##dtype, .threads = {op::quantize_threads}, .tile = {op::quantize_tile<Element>})\
    (const uint32_t *codes,   /* [rows, cols * 4 / 8] bytes */                                               \
     const uint8_t *scales,   /* [rows, cols / 32] */                                                        \
     Element *x,              /* [rows, cols] */                                                             \
     int64_t rows, int64_t cols) {                                                                           \
        op::dequantize_mx<tile::E2m1>(codes, scales, x, rows *cols);                                           \
    }

INSTANCE(f32, float)
INSTANCE(f16, __half)
INSTANCE(bf16, __nv_bfloat16)
