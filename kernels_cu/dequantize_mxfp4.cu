// dequantize_mxfp4: float32, float16 or bfloat16 values of e2m1 codes under ue8m0 scales, 32 to a scale.
#include "op/mx_entries.cuh"

DEQUANTIZE_MX(dequantize_mxfp4, tile::E2m1)
