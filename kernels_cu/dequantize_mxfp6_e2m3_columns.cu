// dequantize_mxfp6_e2m3_columns: values of e2m3 codes and ue8m0 scales of matrices whose blocks of 32 run down the
// columns.
#include "op/mx_entries.cuh"

DEQUANTIZE_MX_COLUMNS(dequantize_mxfp6_e2m3_columns, tile::E2m3)
