// dequantize_mxfp6_e2m3: float32, float16 or bfloat16 values of e2m3 codes under ue8m0 scales, 32 to a scale.
#include "op/mx_entries.cuh"

DEQUANTIZE_MX(dequantize_mxfp6_e2m3, tile::E2m3)
