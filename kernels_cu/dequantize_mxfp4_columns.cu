// dequantize_mxfp4_columns: values of e2m1 codes and ue8m0 scales of matrices whose blocks of 32 run down the columns.
#include "op/mx_entries.cuh"

DEQUANTIZE_MX_COLUMNS(dequantize_mxfp4_columns, tile::E2m1)
