// activate_rows: an activation of every value of rows, into any type or block format.
#include "kernel.cuh"
#include "op/pointwise.cuh"

// With 16-bit elements four blocks fit on a multiprocessor.
#define INSTANCE(suffix, Element, blocks)                                                                              \
    KERNEL(activate_rows##suffix, .threads = {op::produce_threads}, .min_blocks = blocks)                              \
    (const Element *x,        /* [rows, cols] */                                                                       \
     const float *out_global, /* [level_count] or null */                                                              \
     PRODUCED_OUTPUTS, int activation, PRODUCED_SCALARS, int64_t rows, int cols, int64_t level_count,                  \
     int64_t code_bytes, int64_t scale_bytes, int64_t x_row, PRODUCED_STRIDES) {                                       \
        op::activate_rows<Element>(                                                                                    \
            x, x_row, op::Activation(activation),                                                                      \
            op::produced({out_bf16, out_f16, out_f32,                                                                  \
                          op::stride_of(out_bf16, out_f16, out_bf16_row, out_f16_row, out_f32_row)},                   \
                         codes, scales, code_bytes, out_global, ending, rule, swizzled, rows, cols));                  \
    }

INSTANCE(_f32, float, 3)
INSTANCE(_f16, __half, 4)
INSTANCE(_bf16, __nv_bfloat16, 4)
