// quantize_mxfp6_e2m3_columns: e2m3 codes and ue8m0 scales of matrices whose blocks of 32 run down the columns.
#include "op/mx_entries.cuh"

QUANTIZE_MX_COLUMNS(quantize_mxfp6_e2m3_columns, tile::E2m3)
