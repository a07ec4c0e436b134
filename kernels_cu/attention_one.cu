// attention_one: attention of one query for each sequence, on rows of one format in pages.
#include "kernel.cuh"
#include "op/attention_few.cuh"
#include "op/early.cuh"

VARIANTS(dim, 64, 128)
VARIANTS(held, 1, 2, 3, 4)

using Keys = op::KnownKeys<__nv_bfloat16, tile::RowFormat(VARIANT_held - 1)>;
using One = op::FewTiling<__nv_bfloat16, VARIANT_dim, 8, Keys>;

// clang-format off
KERNEL(ENTRY(), .threads = {One::threads}, .shared_bytes = sizeof(One::Shared), .tile = {1, One::rows, 1},
       .min_blocks = One::blocks)
(const __nv_bfloat16 *q,    /* [batch, heads_kv, group, queries, dim] */
 const uint8_t *k,          /* [pages, heads_kv, page, width] */
 const uint8_t *v,          /* the same */
 const int *block_table,    /* [batch, table] */
 const int *key_ends,       /* [batch] */
 const uint8_t *k_scales,   /* [pages, heads_kv, page, blocks] or null */
 const uint8_t *v_scales,   /* the same */
 const float *k_global,     /* [1 or heads_kv] or null */
 const float *row_shift,    /* [batch, heads_kv, group, queries] or null */
 const float *sinks,        /* [heads_kv, group] or null */
 const float *v_global,     /* [v_levels] or null */
 __nv_bfloat16 *out_bf16,   /* [batch, heads_kv, group, queries, dim] or null */
 __half *out_f16, float *out_f32,       /* the same */
 float *lse,                            /* [batch, heads_kv, group, queries] or null */
 float *merged_max, float *merged_sum,  /* the same */
 uint32_t *arrivals,                    /* as lse */
 float *partial,                        /* [nodes, batch, heads_kv, group, queries, dim] */
 float *row_max, float *row_sum,        /* as partial, but without dim */
 float scale, int left, int right, int node_keys, int batch, int heads_kv, int group, int queries, int dim, int pages,
 int page, int width, int table, int blocks, int levels, int v_levels, int nodes, STRIDES_Q(q), STRIDES_PAGES(k),
 STRIDES_PAGES(v), long long block_table_sequence, STRIDES_PAGES(k_scales), STRIDES_PAGES(v_scales),
 STRIDES_Q(out_bf16), STRIDES_Q(out_f16), STRIDES_Q(out_f32)) {
    op::let_next_begin();
    op::attention_few<One>(
        shared<One::Shared>(), q, THE_STRIDES_Q(q),
        {{k, k_scales, THE_STRIDES_PAGES(k, 1), THE_STRIDES_PAGES(k_scales, 1), One::Keys::format, 0},
         {v, v_scales, THE_STRIDES_PAGES(v, 1), THE_STRIDES_PAGES(v_scales, 1), One::Keys::format, 0},
         block_table, block_table_sequence, page, nodes, node_keys, nullptr, k_global, levels},
        {nullptr, nullptr, sinks, nullptr, nullptr, nullptr, key_ends, out_bf16, out_f16, out_f32, lse, partial,
         row_max, row_sum, row_shift, scale, 0.0f, left, right, batch, heads_kv, group, 1, One::dim,
         op::capacity(table, page), One::dim, batch, int(gridDim.x) / heads_kv, {}, {}, THE_STRIDES_Q(out_bf16),
         THE_STRIDES_Q(out_f16), THE_STRIDES_Q(out_f32)},
        {out_bf16 || out_f16 || out_f32, arrivals, merged_max, merged_sum, v_global, v_levels});
}
// clang-format on
