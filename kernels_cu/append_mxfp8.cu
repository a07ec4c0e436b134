// append_mxfp8: writes rows of tokens to their slots in pages, in MXFP8.
#include "kernel.cuh"
#include "op/append_entries.cuh"

APPEND_BLOCKS(op::MxRow<tile::E4m3>)
