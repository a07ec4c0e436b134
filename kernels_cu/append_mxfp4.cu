// append_mxfp4: writes rows of tokens to their slots in pages, in MXFP4.
#include "kernel.cuh"
#include "op/append_entries.cuh"

APPEND_BLOCKS(op::MxRow<tile::E2m1>)
