// row_dot: the dot product of each query with one vector of its sequence and head: the part of its scores that
// smoothing removes.
#include "kernel.cuh"
#include "op/smooth.cuh"

#define INSTANCE(suffix, Element)                                                                                      \
    KERNEL(row_dot##suffix, .threads = {op::smooth_threads}, .tile = {op::dot_rows, 1, 1})                             \
    (const Element *q,        /* [batch, heads_kv, group, queries, cols] */                                            \
     const float *y,          /* [sequences, heads_kv, cols] */                                                        \
     const int *query_starts, /* [sequences] or null */                                                                \
     float *out,              /* [batch, heads_kv, group, queries] */                                                  \
     float scale, int batch, int heads_kv, int group, int queries, int cols, int sequences, int64_t q_batch,           \
     int64_t q_head, int64_t q_group, int64_t q_query) {                                                               \
        op::row_dot(op::QueryRows<Element>{q, q_batch, q_head, q_group, q_query, heads_kv, group, queries, cols,       \
                                           query_starts, sequences},                                                   \
                    y, out, scale);                                                                                    \
    }

INSTANCE(_f32, float)
INSTANCE(_f16, __half)
INSTANCE(_bf16, __nv_bfloat16)
