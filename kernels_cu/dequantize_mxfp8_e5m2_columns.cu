// dequantize_mxfp8_e5m2_columns: values of e5m2 codes and ue8m0 scales of matrices whose blocks of 32 run down the
// columns.
#include "op/mx_entries.cuh"

DEQUANTIZE_MX_COLUMNS(dequantize_mxfp8_e5m2_columns, tile::E5m2)
