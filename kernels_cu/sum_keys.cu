// sum_keys: sums of keys over runs of 256, of which mean_keys makes their mean.
#include "kernel.cuh"
#include "op/smooth.cuh"

#define INSTANCE(suffix, Element)                                                                                      \
    KERNEL(sum_keys##suffix, .threads = {op::smooth_threads}, .shared_bytes = sizeof(op::SumShared), .tile = {1, 1, 1})\
    (const Element *x,      /* [batch, heads, keys, cols] */                                                           \
     const int *key_ends,   /* [batch] or null */                                                                      \
     float *partial,        /* [runs, batch, heads, cols] */                                                           \
     int batch, int heads, int keys, int cols, int runs, KEY_STRIDES(x)) {                                             \
        op::sum_keys(shared<op::SumShared>(), KEY_ARRAY(x), partial);                                                  \
    }

INSTANCE(_f32, float)
INSTANCE(_f16, __half)
INSTANCE(_bf16, __nv_bfloat16)
