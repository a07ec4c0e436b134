// mean_rows: the means of the rows of sequences.
#include "kernel.cuh"
#include "op/rows.cuh"

#define INSTANCE(suffix, Element)                                                                                      \
    KERNEL(mean_rows##suffix, .threads = {op::mean_threads}, .shared_bytes = sizeof(op::MeanShared))                   \
    (const Element *x,                                         /* [tokens, cols] */                                    \
     const int *starts,                                        /* [bounds] */                                          \
     float *out_f32, __half *out_f16, __nv_bfloat16 *out_bf16, /* [sequences, cols], one of them */                    \
     int normalize, int64_t tokens, int cols, int bounds, int64_t sequences, int64_t x_row, PRODUCED_STRIDES) {        \
        const int64_t out_row = op::stride_of(out_bf16, out_f16, out_bf16_row, out_f16_row, out_f32_row);              \
        op::mean_rows<Element>(shared<op::MeanShared>(), x, x_row, starts, normalize != 0,                             \
                               {out_bf16, out_f16, out_f32, out_row}, tokens, cols);                                   \
    }

INSTANCE(_f32, float)
INSTANCE(_f16, __half)
INSTANCE(_bf16, __nv_bfloat16)
