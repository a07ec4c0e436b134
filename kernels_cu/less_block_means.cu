// less_block_means: the means of blocks of 64 queries, and the queries minus their block's mean.
#include "kernel.cuh"
#include "op/smooth.cuh"

#define INSTANCE(suffix, Element)                                                                                      \
    KERNEL(less_block_means##suffix, .threads = {op::smooth_threads}, .shared_bytes = sizeof(op::ScanShared),          \
           .tile = {1, 1, 1})                                                                                          \
    (const Element *x,        /* [batch, heads, queries, cols] */                                                      \
     const int *query_starts, /* [sequences] or null */                                                                \
     const int *query_ends,   /* [sequences] or null */                                                                \
     float *mean,             /* [batch, heads, blocks, cols] */                                                       \
     float *y,                /* [batch, heads, queries, cols] */                                                      \
     int batch, int heads, int queries, int cols, int sequences, int blocks, int64_t x_batch, int64_t x_head,          \
     int64_t x_query) {                                                                                                \
        const op::KeyArray<Element> rows{x,    query_starts, query_ends, batch,  heads,  queries,                      \
                                         cols, sequences,    x_batch,    x_head, x_query};                             \
        op::less_block_means(shared<op::ScanShared>(), rows, mean, y);                                                 \
    }

INSTANCE(_f32, float)
INSTANCE(_f16, __half)
INSTANCE(_bf16, __nv_bfloat16)
