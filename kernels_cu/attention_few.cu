// attention_few: attention of few queries, on rows in pages, consecutive rows or tiles, in any format.
#include "kernel.cuh"
#include "op/attention_few.cuh"
#include "op/early.cuh"

VARIANTS(dim dim_v rows, 64 64 8, 64 64 16, 128 128 8, 128 128 16, 256 256 8, 256 256 16)

template <class Element>
using Few = op::FewTiling<Element, VARIANT_dim, VARIANT_rows>;

// clang-format off
#define INSTANCE(suffix, Element)                                                                                      \
    KERNEL(ENTRY(suffix), .threads = {Few<Element>::threads}, .shared_bytes = sizeof(Few<Element>::Shared),            \
           .tile = {1, Few<Element>::rows, 1}, .min_blocks = Few<Element>::blocks,                                     \
           .spill_bytes = Few<Element>::spilled)                                                                       \
    (const Element *q,          /* [batch, heads_kv, group, queries, dim] */                                           \
     const uint8_t *k,          /* [pages, heads_kv, page, k_width]: rows, or tiles */                                 \
     const uint8_t *v,          /* [pages, heads_kv, page, v_width] */                                                 \
     const uint8_t *k_scales,   /* [pages, heads_kv, page, k_blocks] or null */                                        \
     const uint8_t *v_scales,   /* [pages, heads_kv, page, v_blocks] or null */                                        \
     const int *block_table,    /* [sequences, table] or null */                                                       \
     const int *query_starts, const int *query_ends,   /* [sequences] or null */                                       \
     const int *key_starts, const int *key_ends,       /* [sequences] or null */                                       \
     const float *q_global,     /* [1] or null */                                                                      \
     const float *k_global,     /* [1 or heads_kv] or null */                                                          \
     const float *row_shift,    /* [batch, heads_kv, group, queries] or null */                                        \
     const float *sinks,        /* [heads_kv, group] or null */                                                        \
     const float *v_global,     /* [v_levels] or null */                                                               \
     __nv_bfloat16 *out_bf16,   /* [batch, heads_kv, group, queries, dim_v] or null */                                 \
     __half *out_f16, float *out_f32, /* the same */                                                                   \
     float *lse,                      /* [batch, heads_kv, group, queries] or null */                                  \
     float *merged_max, float *merged_sum, /* the same */                                                              \
     uint32_t *arrivals,        /* as lse */                                                                           \
     float *partial,            /* [nodes, batch, heads_kv, group, queries, dim_v] */                                  \
     float *row_max, float *row_sum, ATTENTION_SCALARS(AS_PARAMETER) /* as partial, but without dim_v */               \
     int k_holds, int v_holds, int k_tile, int v_tile, int most_keys, int batch, int heads_kv, int group, int queries, \
     int dim, int pages, int page, int k_width, int v_width, int k_blocks, int v_blocks, int sequences, int table,     \
     int levels, int v_levels, int dim_v, int nodes, STRIDES_Q(q), STRIDES_PAGES(k), STRIDES_PAGES(v),                 \
     STRIDES_PAGES(k_scales), STRIDES_PAGES(v_scales), long long block_table_sequence, STRIDES_Q(out_bf16),            \
     STRIDES_Q(out_f16), STRIDES_Q(out_f32)) {                                                                         \
        op::let_next_begin();                                                                                          \
        op::attention_few<Few<Element>>(                                                                               \
            shared<typename Few<Element>::Shared>(), q, THE_STRIDES_Q(q),                                              \
            {{k, k_scales, THE_STRIDES_PAGES(k, 1), THE_STRIDES_PAGES(k_scales, 1), tile::RowFormat(k_holds), k_tile}, \
             {v, v_scales, THE_STRIDES_PAGES(v, 1), THE_STRIDES_PAGES(v_scales, 1), tile::RowFormat(v_holds), v_tile}, \
             block_table, block_table_sequence, page, nodes, op::node_keys, q_global, k_global, levels},               \
            {nullptr, nullptr, sinks, query_starts, query_ends, key_starts, key_ends, out_bf16, out_f16, out_f32, lse, \
             partial, row_max, row_sum, row_shift, scale, softcap, left, right, batch, heads_kv, group, queries, dim,  \
             block_table ? op::capacity(table, page) : most_keys, dim_v, sequences, int(gridDim.x) / heads_kv, {}, {}, \
             THE_STRIDES_Q(out_bf16), THE_STRIDES_Q(out_f16), THE_STRIDES_Q(out_f32)},                                 \
            {out_bf16 || out_f16 || out_f32, arrivals, merged_max, merged_sum, v_global, v_levels});                   \
    }
// clang-format on

INSTANCE(_bf16, __nv_bfloat16)
INSTANCE(_f16, __half)
