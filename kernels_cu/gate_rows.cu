// gate_rows: gated activations of pairs of values, into any type or block format.
#include "kernel.cuh"
#include "op/pointwise.cuh"

// With 16-bit elements three blocks fit on a multiprocessor; one value is stored once, before the loop of long code.
#define INSTANCE(suffix, Element, blocks, spilled)                                                                     \
    KERNEL(gate_rows##suffix, .threads = {op::produce_threads}, .min_blocks = blocks, .spill_bytes = spilled)          \
    (const Element *x,         /* [rows, 2 cols] */                                                                    \
     const float *row_weights, /* [rows] or null */                                                                    \
     const float *out_global,  /* [level_count] or null */                                                             \
     PRODUCED_OUTPUTS, int interleaved, float limit, float gate_alpha, float offset, int rounds, PRODUCED_SCALARS,     \
     int64_t rows, int cols, int64_t level_count, int64_t code_bytes, int64_t scale_bytes, int64_t x_row,              \
     PRODUCED_STRIDES) {                                                                                               \
        op::gate_rows<Element>(                                                                                        \
            x, x_row, interleaved != 0, {limit, gate_alpha, offset}, row_weights, rounds != 0,                         \
            op::produced({out_bf16, out_f16, out_f32,                                                                  \
                          op::stride_of(out_bf16, out_f16, out_bf16_row, out_f16_row, out_f32_row)},                   \
                         codes, scales, code_bytes, out_global, ending, rule, swizzled, rows, cols));                  \
    }

INSTANCE(_f32, float, 2, 0)
INSTANCE(_f16, __half, 3, 8)
INSTANCE(_bf16, __nv_bfloat16, 3, 8)
