// dequantize_mxfp8_columns: values of e4m3 codes and ue8m0 scales of matrices whose blocks of 32 run down the columns.
#include "op/mx_entries.cuh"

DEQUANTIZE_MX_COLUMNS(dequantize_mxfp8_columns, tile::E4m3)
