// append_nvfp4: writes rows of tokens to their slots in pages, in NVFP4.
#include "kernel.cuh"
#include "op/append_entries.cuh"

APPEND_BLOCKS(op::Nvfp4Row)
