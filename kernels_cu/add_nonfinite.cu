// add_nonfinite: infinities and NaN of values in pages, in the outputs of the queries that see them.
#include "kernel.cuh"
#include "op/nonfinite.cuh"

KERNEL(add_nonfinite, .threads = {op::nonfinite_threads}, .tile = {op::nonfinite_queries})
(const uint8_t *codes,      // [pages, heads_kv, page, width]
 const uint8_t *scales,     // [pages, heads_kv, page, blocks] or null
 const int *block_table,    // [sequences, table]
 const int *key_ends,       // [sequences]
 const uint32_t *marks,     // [heads_kv, sequences]
 const int *query_starts,   // [sequences] or null
 const int *query_ends,     // [sequences] or null
 __nv_bfloat16 *out_bf16,   // [batch, heads_kv, group, queries, dim_v] or null
 __half *out_f16,           // [batch, heads_kv, group, queries, dim_v] or null
 float *out_f32,            // [batch, heads_kv, group, queries, dim_v] or null
 int holds, int is_f16, int keys, int left, int right, int pages, int heads_kv, int page, int width, int blocks,
 int sequences, int table, int batch, int group, int queries, int dim_v, long long codes_page, long long codes_head,
 long long codes_token, long long scales_page, long long scales_head, long long scales_token,
 long long block_table_sequence, STRIDES_Q(out_bf16), STRIDES_Q(out_f16), STRIDES_Q(out_f32)) {
    op::add_nonfinite(
        marks, sequences, is_f16 != 0, tile::RowFormat(holds),
        {codes,
         {codes_page, codes_head, codes_token},
         scales,
         {scales_page, scales_head, scales_token},
         int(blockIdx.y),
         width,
         blocks},
        {block_table + blockIdx.z * block_table_sequence, page, 1},
        {query_starts, query_ends, queries, min(key_ends[blockIdx.z], keys), left, right},
        {out_bf16, out_f16, out_f32, THE_STRIDES_Q(out_bf16), THE_STRIDES_Q(out_f16), THE_STRIDES_Q(out_f32)}, group,
        dim_v);
}
