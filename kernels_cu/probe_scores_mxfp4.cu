// probe_scores_mxfp4: Q K^T exactly as attention_mxfp4_bf16_in_kernel multiplies it, before scale, mask and softmax.
#include "kernel.cuh"
#include "op/attention_mxfp4_bf16_in_kernel.cuh"

VARIANTS(dim, 32, 64, 128, 224, 256)

#define INSTANCE(suffix, Element)                                                                            \
    KERNEL(ENTRY(suffix), .threads = {op::attention_threads},            \
           .shared_bytes = sizeof(op::AttentionShared<Element, VARIANT_dim, false>),                         \
           .tile = {op::attention_queries, 1, 1})                                                            \
    (const Element *q,   /* [batch, heads, queries, dim] */                                                  \
     const Element *k,   /* [batch, heads, keys, dim] */                                                     \
     float *scores,      /* [batch, heads, queries, keys] */                                                 \
     int batch, int heads, int queries, int dim, int keys) {                                                 \
        const size_t head = blockIdx.y + size_t(heads) * blockIdx.z;                                         \
        op::probe_scores_mxfp4<Element, VARIANT_dim>(                                                        \
            shared<op::AttentionShared<Element, VARIANT_dim, false>>(),                                      \
            {q + head * queries * VARIANT_dim, k + head * keys * VARIANT_dim, nullptr, queries, keys},       \
            scores + head * queries * keys);                                                                 \
    }

INSTANCE(_f32, float)
INSTANCE(_f16, __half)
INSTANCE(_bf16, __nv_bfloat16)
