// quantize_mxfp4_columns: e2m1 codes and ue8m0 scales of matrices whose blocks of 32 run down the columns.
#include "op/mx_entries.cuh"

QUANTIZE_MX_COLUMNS(quantize_mxfp4_columns, tile::E2m1)
