// attention_paged_nvfp4: attention of few queries on pages of keys and values in NVFP4.
#include "kernel.cuh"
#include "op/attention_few.cuh"

VARIANTS(dim dim_v, 64 64, 128 128, 256 256)

template <class Element>
using Few = op::FewTiling<tile::CachedNvfp4<Element>, tile::CachedNvfp4<Element>, VARIANT_dim>;

#define INSTANCE(suffix, Element)                                                                                      \
    KERNEL(JOIN(JOIN(attention_paged_nvfp4_dim, VARIANT_dim, _dim_v), VARIANT_dim_v, suffix),                          \
           .threads = {Few<Element>::threads},                                                                         \
           .shared_bytes = sizeof(Few<Element>::Shared), .tile = {1, Few<Element>::rows, 1},                           \
           .min_blocks = Few<Element>::blocks, .spill_bytes = VARIANT_dim > 128 ? 768 : 0)                             \
    (const Element *q,           /* [batch, heads_kv, group, queries, dim] */                                          \
     const uint8_t *k,           /* [pages, heads_kv, page, dim / 2] */                                                \
     const uint8_t *k_scales,    /* [pages, heads_kv, page, dim / 16] */                                               \
     const uint8_t *v,           /* [pages, heads_kv, page, dim_v / 2] */                                              \
     const uint8_t *v_scales,    /* [pages, heads_kv, page, dim_v / 16] */                                             \
     PAGED_ARRAYS, ATTENTION_SCALARS, int batch, int heads_kv, int group, int queries, int dim, int pages, int page,   \
     int dim_v, int sequences, int table, int nodes, STRIDES_Q(q), STRIDES_PAGES(k), STRIDES_PAGES(k_scales),          \
     STRIDES_PAGES(v), STRIDES_PAGES(v_scales), long long block_table_sequence) {                                      \
        op::attention_few<Few<Element>>(shared<typename Few<Element>::Shared>(), q, THE_STRIDES_Q(q),                  \
                                        {k, k_scales, v, v_scales, THE_STRIDES_PAGES(k, 1), THE_STRIDES_PAGES(k_scales, 1),\
                                         THE_STRIDES_PAGES(v, 1), THE_STRIDES_PAGES(v_scales, 1), block_table,         \
                                         block_table_sequence, page, table, k_global},                                 \
                                        PAGED_OPTIONS);                                                                \
    }

INSTANCE(_bf16, __nv_bfloat16)
INSTANCE(_f16, __half)
