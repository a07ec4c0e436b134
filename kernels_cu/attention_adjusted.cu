// attention_adjusted: attention_bf16 with what caches of keys add to scores: a factor for each head, and under a cap
// the part that a mean of the keys has.
#include "kernel.cuh"
#include "op/adjusted.cuh"

VARIANTS(dim dim_v, 64 64, 128 128, 256 256)

template <class Element>
using Tiling = op::Tiling<Element, VARIANT_dim, VARIANT_dim_v>;

// At 64 x 64 values are spilled before the loop over tiles and reloaded after it, as in attention_bf16 in f16.
constexpr int spill_bytes = VARIANT_dim == 64 ? 192 : 0;

#define INSTANCE(suffix, Element)                                                                                      \
    KERNEL(ENTRY(suffix), .threads = {Tiling<Element>::threads}, .shared_bytes = sizeof(Tiling<Element>::Shared),      \
           .tile = {1, Tiling<Element>::rows, 1}, .min_blocks = Tiling<Element>::blocks, .spill_bytes = spill_bytes)   \
    (const Element *q,       /* [batch, heads_kv, group, queries, dim] */                                              \
     const Element *k,       /* [batch, heads_kv, keys, dim] */                                                        \
     const Element *v,       /* [batch, heads_kv, keys, dim_v] */                                                      \
     const float *k_global,  /* [heads_kv] or null */                                                                  \
     const float *row_shift, /* [batch, heads_kv, group, queries] or null */                                           \
     ATTENTION_ARRAYS(AS_PARAMETER) ATTENTION_SCALARS(AS_PARAMETER) int batch, int heads_kv, int group, int queries,   \
     int dim, int keys, int dim_v, int sequences, int splits, STRIDES_Q(q), STRIDES_K(k), STRIDES_K(v),                \
     ATTENTION_STRIDES(STRIDES_MASK, STRIDES_Q)) {                                                                     \
        op::adjusted_attention<Tiling<Element>>(                                                                       \
            shared<typename Tiling<Element>::Shared>(),                                                                \
            {q, k, v, THE_STRIDES_Q(q), THE_STRIDES_K(k), THE_STRIDES_K(v)},                                           \
            ATTENTION_OPTIONS(row_shift, batch, heads_kv, group, queries, dim, keys, dim_v, sequences, splits),        \
            k_global);                                                                                                 \
    }

INSTANCE(_bf16, __nv_bfloat16)
INSTANCE(_f16, __half)
