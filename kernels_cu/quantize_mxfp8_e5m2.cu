// quantize_mxfp8_e5m2: e5m2 codes and ue8m0 scales of float32, float16 or bfloat16 values, 32 to a scale.
#include "op/mx_entries.cuh"

QUANTIZE_MX(quantize_mxfp8_e5m2, tile::E5m2)
