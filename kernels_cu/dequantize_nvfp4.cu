// dequantize_nvfp4: float32, float16 or bfloat16 values of e2m1 codes under ue4m3 scales, 16 to a scale, and a global
// scale.
#include "kernel.cuh"
#include "op/quantize.cuh"

#define INSTANCE(dtype, Element)                                                                                       \
    KERNEL(dequantize_nvfp4_##dtype, .threads = {op::quantize_threads}, .tile = {op::quantize_tile<Element>})          \
    (const uint32_t *codes,     /* [rows, cols / 2] bytes */                                                           \
     const uint8_t *scales,     /* [rows, cols / 16] */                                                                \
     const float *global_scale, /* [1] */                                                                              \
     Element *x,                /* [rows, cols] */                                                                     \
     int64_t rows, int64_t cols) {                                                                                     \
        op::dequantize_nvfp4(codes, scales, *global_scale, x, rows * cols);                                            \
    }

INSTANCE(f32, float)
INSTANCE(f16, __half)
INSTANCE(bf16, __nv_bfloat16)
