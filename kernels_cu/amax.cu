// amax: the largest finite magnitude of an array, one partial result for each block.
#include "kernel.cuh"
#include "op/reduce.cuh"

#define INSTANCE(dtype, Element)                                                                                       \
    KERNEL(amax_##dtype, .threads = {op::reduce_threads}, .shared_bytes = sizeof(op::ReduceShared), .tile = {1},       \
           .min_blocks = op::reduce_blocks<Element>)                                                                   \
    (const Element *x, /* [count] */                                                                                   \
     float *partial,   /* [blocks] */                                                                                  \
     int64_t count, int64_t blocks) {                                                                                  \
        op::amax(shared<op::ReduceShared>(), x, partial, count);                                                       \
    }

INSTANCE(f32, float)
INSTANCE(f16, __half)
INSTANCE(bf16, __nv_bfloat16)
