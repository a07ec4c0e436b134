// scan_keys: sums of keys over runs of 256, and their largest magnitudes.
#include "kernel.cuh"
#include "op/smooth.cuh"

#define INSTANCE(suffix, Element)                                                                                      \
    KERNEL(scan_keys##suffix, .threads = {op::smooth_threads}, .shared_bytes = sizeof(op::ScanShared),                 \
           .tile = {1, 1, 1}, .min_blocks = 4)                                                                         \
    (const Element *x,      /* [batch, heads, keys, cols] */                                                           \
     const int *key_starts, /* [sequences] or null */                                                                  \
     const int *key_ends,   /* [sequences] or null */                                                                  \
     float *sums,           /* [runs, batch, heads, cols] or null */                                                   \
     float *largest,        /* [runs, batch, heads] or null */                                                         \
     int batch, int heads, int keys, int cols, int sequences, int runs, KEY_STRIDES(x)) {                              \
        op::scan_keys(                                                                                                 \
            shared<op::ScanShared>(),                                                                                  \
            op::KeyArray{x, key_starts, key_ends, batch, heads, keys, cols, sequences, x_batch, x_head, x_key}, sums,  \
            largest);                                                                                                  \
    }

INSTANCE(_f32, float)
INSTANCE(_f16, __half)
INSTANCE(_bf16, __nv_bfloat16)
