// probe_scores_mxfp4: Q K^T exactly as attention_mxfp4_bf16_in_kernel multiplies it, before scale, mask and softmax.
#include "kernel.cuh"
#include "op/quantized_blocks.cuh"

VARIANTS(dim, 64, 128, 192, 256)

using Tiling = op::BlockTiling<tile::Mxfp4, tile::Bf16, VARIANT_dim, VARIANT_dim>;

#define INSTANCE(suffix, Element)                                                                                      \
    KERNEL(ENTRY(suffix), .threads = {Tiling::threads}, .shared_bytes = sizeof(Tiling::Shared),                        \
           .tile = {1, Tiling::rows, 1}, .min_blocks = Tiling::blocks, .spill_bytes = Tiling::spill_bytes)             \
    (const Element *q, /* [batch, heads, queries, dim] */                                                              \
     const Element *k, /* [batch, heads, keys, dim] */                                                                 \
     float *scores,    /* [batch, heads, queries, keys] */                                                             \
     int batch, int heads, int queries, int dim, int keys) {                                                           \
        op::AttentionOptions options{};                                                                                \
        options.left = options.right = 0x7fffffff;                                                                     \
        options.batch = options.sequences = batch, options.heads_kv = heads, options.group = options.splits = 1;       \
        options.queries = queries, options.dim = dim, options.keys = keys;                                             \
        const op::StridesQ q_strides = {int64_t(heads) * queries * dim, int64_t(queries) * dim, 0, dim};               \
        const op::StridesK k_strides = {int64_t(heads) * keys * dim, int64_t(keys) * dim, dim};                        \
        op::probe_scores<Tiling>(shared<Tiling::Shared>(),                                                             \
                                 op::InKernelOperands<Element, false>{q, k, nullptr, q_strides, k_strides, {}},        \
                                 options, scores);                                                                     \
    }

INSTANCE(_f32, float)
INSTANCE(_f16, __half)
INSTANCE(_bf16, __nv_bfloat16)
