// attention_mxfp4_bf16_in_kernel: attention that quantizes Q and K to MXFP4 as it loads them, with P and V in bf16.
#include "kernel.cuh"
#include "op/quantized_blocks.cuh"

VARIANTS(dim dim_v, 64 64, 128 128, 256 256)

using Tiling = op::BlockTiling<tile::Mxfp4, tile::Bf16, VARIANT_dim, VARIANT_dim_v, false>;

#define INSTANCE(suffix, Element)                                                                                      \
    KERNEL(ENTRY(suffix), .threads = {Tiling::threads}, .shared_bytes = sizeof(Tiling::Shared),                        \
           .tile = {1, Tiling::rows, 1}, .min_blocks = Tiling::blocks, .spill_bytes = Tiling::spill_bytes)             \
    (const Element *q, /* [batch, heads_kv, group, queries, dim] */                                                    \
     const Element *k, /* [batch, heads_kv, keys, dim] */                                                              \
     const Element *v, /* [batch, heads_kv, keys, dim_v] */                                                            \
     ATTENTION_ARRAYS(AS_PARAMETER) ATTENTION_SCALARS(AS_PARAMETER) int batch, int heads_kv, int group, int queries,   \
     int dim, int keys, int dim_v, int sequences, int splits, STRIDES_Q(q), STRIDES_K(k), STRIDES_K(v),                \
     ATTENTION_STRIDES(STRIDES_MASK, STRIDES_Q)) {                                                                     \
        op::attention_blocks<Tiling>(                                                                                  \
            shared<Tiling::Shared>(),                                                                                  \
            op::InKernelOperands<Element>{q, k, v, THE_STRIDES_Q(q), THE_STRIDES_K(k), THE_STRIDES_K(v)},              \
            ATTENTION_OPTIONS(nullptr, batch, heads_kv, group, queries, dim, keys, dim_v, sequences, splits),          \
            nullptr);                                                                                                  \
    }

INSTANCE(_f32, float)
INSTANCE(_f16, __half)
INSTANCE(_bf16, __nv_bfloat16)
