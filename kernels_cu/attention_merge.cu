// attention_merge: attention over segments of the keys, merged into attention over all of them.
#include "kernel.cuh"
#include "op/merge_segments.cuh"

#define STRIDES(name) int64_t name##_batch, int64_t name##_head, int64_t name##_query, int64_t name##_column
#define STRIDED(name) {name, name##_batch, name##_head, name##_query, name##_column}

KERNEL(attention_merge, .threads = {op::merge_threads}, .tile = {op::merge_tile})
(const float *partial,      // [splits, batch, heads, queries, width]
 const float *row_max,      // [splits, batch, heads, queries]
 const float *row_sum,      // the same or null
 const float *exact_sum,    // the same or null
 const float *sinks,        // [heads] or null
 const float *row_shift,    // [batch, heads, queries] or null
 const float *v_global,     // [heads_kv] or null
 __nv_bfloat16 *out_bf16,   // [batch, heads, queries, dim_v] or null
 __half *out_f16,           // the same
 float *out_f32,            // the same
 float *lse,                // [batch, heads, queries] or null
 float *merged_max,         // the same
 float *merged_sum,         // the same
 int natural, int complete, int splits, int batch, int heads, int queries, int width, int heads_kv, int dim_v,
 STRIDES(out_bf16), STRIDES(out_f16), STRIDES(out_f32)) {
    op::merge_segments({partial, row_max, row_sum, exact_sum, sinks, row_shift, v_global, natural != 0, complete != 0,
                        splits, batch, heads, queries, at_least_one(heads_kv), width, dim_v},
                       {STRIDED(out_bf16), STRIDED(out_f16), STRIDED(out_f32), lse, merged_max, merged_sum});
}
