// attention_paged_mxfp4: attention of few queries on pages of keys and values in MXFP4, multiplied in bf16.
#include "kernel.cuh"
#include "op/attention_few.cuh"

VARIANTS(dim dim_v, 64 64, 128 128, 256 256)

using Few = op::FewTiling<tile::CachedMxfp4, tile::CachedMxfp4, VARIANT_dim>;

KERNEL(JOIN(JOIN(attention_paged_mxfp4_dim, VARIANT_dim, _dim_v), VARIANT_dim_v, ), .threads = {Few::threads},
       .shared_bytes = sizeof(Few::Shared), .tile = {1, Few::rows, 1}, .min_blocks = Few::blocks,
       .spill_bytes = VARIANT_dim > 128 ? 1024 : 256)
(const __nv_bfloat16 *q,     // [batch, heads_kv, group, queries, dim]
 const uint8_t *k,           // [pages, heads_kv, page, dim / 2]
 const uint8_t *k_scales,    // [pages, heads_kv, page, dim / 32]
 const uint8_t *v,           // [pages, heads_kv, page, dim_v / 2]
 const uint8_t *v_scales,    // [pages, heads_kv, page, dim_v / 32]
 PAGED_ARRAYS, ATTENTION_SCALARS, int batch, int heads_kv, int group, int queries, int dim, int pages, int page,
 int dim_v, int sequences, int table, int nodes, STRIDES_Q(q), STRIDES_PAGES(k), STRIDES_PAGES(k_scales),
 STRIDES_PAGES(v), STRIDES_PAGES(v_scales), long long block_table_sequence) {
    op::attention_few<Few>(shared<Few::Shared>(), q, THE_STRIDES_Q(q),
                           {k, k_scales, v, v_scales, THE_STRIDES_PAGES(k, 1), THE_STRIDES_PAGES(k_scales, 1),
                            THE_STRIDES_PAGES(v, 1), THE_STRIDES_PAGES(v_scales, 1), block_table, block_table_sequence,
                            page, table, k_global},
                           PAGED_OPTIONS);
}
