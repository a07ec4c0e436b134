// add_experts: the weighted sum of the results of each token's experts.
#include "kernel.cuh"
#include "op/route.cuh"

#define INSTANCE(dtype, Element)                                                                                       \
    KERNEL(add_experts_##dtype, .threads = {op::combine_threads}, .tile = {op::combine_columns, 1})                    \
    (const Element *x,     /* [rows, cols] */                                                                          \
     const int *places,    /* [tokens, chosen] */                                                                      \
     const float *weights, /* [tokens, chosen] */                                                                      \
     Element *y,           /* [tokens, cols] */                                                                        \
     int64_t rows, int64_t cols, int tokens, int chosen, long long x_row) {                                            \
        op::combine(x, x_row, places, weights, y, cols, chosen);                                                       \
    }

INSTANCE(f32, float)
INSTANCE(f16, __half)
INSTANCE(bf16, __nv_bfloat16)
