// attention_mxfp4_bf16_in_kernel: attention that quantizes Q and K to MXFP4 as it loads them and multiplies P and V in bf16.
#include "kernel.cuh"
#include "op/attention_mxfp4_bf16_in_kernel.cuh"

VARIANTS(dim, 32, 64, 96, 128, 160, 192, 224, 256)

#define INSTANCE(suffix, Element)                                                                            \
    KERNEL(ENTRY(suffix), .threads = {op::attention_threads},          \
           .shared_bytes = sizeof(op::AttentionShared<Element, VARIANT_dim, true>),                          \
           .tile = {op::attention_queries, 1, 1})                                                            \
    (const Element *q,           /* [batch, heads, queries, dim] */                                          \
     const Element *k,           /* [batch, heads, keys, dim] */                                             \
     const Element *v,           /* [batch, heads, keys, dim] */                                             \
     __nv_bfloat16 *out_bf16,    /* [batch, heads, queries, dim] or null */                                  \
     float *out_f32,             /* [batch, heads, queries, dim] or null */                                  \
     float *lse,                 /* [batch, heads, queries] or null */                                       \
     float scale, int causal, int batch, int heads, int queries, int dim, int keys) {                        \
        const size_t head = blockIdx.y + size_t(heads) * blockIdx.z;                                         \
        const size_t q_offset = head * queries * VARIANT_dim, k_offset = head * keys * VARIANT_dim;          \
        op::attention_mxfp4_bf16_in_kernel<Element, VARIANT_dim>(                                                      \
            shared<op::AttentionShared<Element, VARIANT_dim, true>>(),                                       \
            {q + q_offset, k + k_offset, v + k_offset, queries, keys},                                       \
            out_bf16 ? out_bf16 + q_offset : nullptr, out_f32 ? out_f32 + q_offset : nullptr,                \
            lse ? lse + head * queries : nullptr, scale, causal);                                            \
    }

INSTANCE(_f32, float)
INSTANCE(_f16, __half)
INSTANCE(_bf16, __nv_bfloat16)
