// quantize_mxfp6_e2m3: e2m3 codes and ue8m0 scales of float32, float16 or bfloat16 values, 32 to a scale.
#include "op/mx_entries.cuh"

QUANTIZE_MX(quantize_mxfp6_e2m3, tile::E2m3)
