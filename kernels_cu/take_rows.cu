// take_rows: rows of a table by their numbers, into any type or block format.
#include "kernel.cuh"
#include "op/pointwise.cuh"

#define INSTANCE(suffix, Element)                                                                                      \
    KERNEL(take_rows##suffix, .threads = {op::produce_threads}, .min_blocks = 3)                                       \
    (const Element *table,    /* [entries, cols] */                                                                    \
     const int *ids,          /* [rows] */                                                                             \
     const float *out_global, /* [level_count] or null */                                                              \
     PRODUCED_OUTPUTS, PRODUCED_SCALARS, int entries, int cols, int64_t rows, int64_t level_count, int64_t code_bytes, \
     int64_t scale_bytes, int64_t table_row, PRODUCED_STRIDES) {                                                       \
        op::take_rows<Element>(                                                                                        \
            table, table_row, entries, ids,                                                                            \
            op::produced({out_bf16, out_f16, out_f32,                                                                  \
                          op::stride_of(out_bf16, out_f16, out_bf16_row, out_f16_row, out_f32_row)},                   \
                         codes, scales, code_bytes, out_global, ending, rule, swizzled, rows, cols));                  \
    }

INSTANCE(_f32, float)
INSTANCE(_f16, __half)
INSTANCE(_bf16, __nv_bfloat16)
