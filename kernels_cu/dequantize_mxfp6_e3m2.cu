// dequantize_mxfp6_e3m2: float32, float16 or bfloat16 values of e3m2 codes under ue8m0 scales, 32 to a scale.
#include "op/mx_entries.cuh"

DEQUANTIZE_MX(dequantize_mxfp6_e3m2, tile::E3m2)
