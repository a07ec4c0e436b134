// dequantize_mxfp6_e2m3: float32, float16 or bfloat16 values of e2m3 codes under ue8m0 scales, 32 to a scale.
#include "kernel.cuh"
#include "op/quantize.cuh"

#define INSTANCE(dtype, Element)                                                                             \
    KERNEL(dequantize_mxfp6_e2m3_##dtype, .threads = {op::quantize_threads}, .tile = {op::quantize_tile<Element>})\
    (const uint32_t *codes,   /* [rows, cols * 6 / 8] bytes */                                               \
     const uint8_t *scales,   /* [rows, cols / 32] */                                                        \
     Element *x,              /* [rows, cols] */                                                             \
     int64_t rows, int64_t cols) {                                                                           \
        op::dequantize_mx<tile::E2m3>(codes, scales, x, rows *cols);                                           \
    }

INSTANCE(f32, float)
INSTANCE(f16, __half)
INSTANCE(bf16, __nv_bfloat16)
