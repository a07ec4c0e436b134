// argmax_rows: the column of the largest value of each row.
#include "kernel.cuh"
#include "op/rows.cuh"

#define INSTANCE(suffix, Element)                                                                                      \
    KERNEL(argmax_rows##suffix, .threads = {op::argmax_threads}, .shared_bytes = sizeof(op::ArgmaxShared))             \
    (const Element *x, /* [rows, cols] */                                                                              \
     int *places,      /* [rows] */                                                                                    \
     int64_t rows, int cols, int64_t x_row) {                                                                          \
        op::argmax_rows<Element>(shared<op::ArgmaxShared>(), x, x_row, places, cols);                                  \
    }

INSTANCE(_f32, float)
INSTANCE(_f16, __half)
INSTANCE(_bf16, __nv_bfloat16)
