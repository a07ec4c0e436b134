// probe_ending: float32 rows stored by the ending that kernels share: in 16 bits, or as codes and scales.
#include "kernel.cuh"
#include "op/probe_ending.cuh"

KERNEL(probe_ending, .threads = {32 * op::probe_ending_warps}, .shared_bytes = sizeof(op::ProbeEndingShared),
       .tile = {op::probe_ending_columns, op::probe_ending_rows})
(const float *x,            // [rows, cols]
 __nv_bfloat16 *out_bf16,   // [rows, cols], as the following two
 __half *out_f16, float *out_f32,
 uint8_t *codes,    // [rows, code_bytes]
 uint8_t *scales,   // [scale_bytes]
 int ending, int rule, int swizzled, int way, float global_scale, int64_t rows, int64_t cols, int64_t code_bytes,
 int64_t scale_bytes) {
    const int64_t blocks = (cols + (ending == 3 ? 15 : 31)) / (ending == 3 ? 16 : 32);
    op::probe_ending(
        shared<op::ProbeEndingShared>(), {nullptr, nullptr, x, cols}, {out_bf16, out_f16, out_f32, cols},
        {op::EndingFormat(ending), codes, scales, code_bytes, {blocks, blocks, swizzled != 0}, rule, global_scale},
        op::ValuesInLanes(way), rows, cols);
}
