// append_bf16: writes rows of tokens to their slots in pages, in bf16 or f16.
#include "kernel.cuh"
#include "op/append_entries.cuh"

APPEND_PLAIN(_bf16, __nv_bfloat16)
APPEND_PLAIN(_f16, __half)
