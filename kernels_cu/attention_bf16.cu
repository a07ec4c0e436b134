// attention_bf16: attention on Q, K and V in bf16 or f16.
#include "kernel.cuh"
#include "op/attention.cuh"
#include "op/early_if.cuh"

VARIANTS(dim dim_v, 32 32, 64 64, 96 96, 128 128, 192 128, 192 192, 256 256)

template <class Element>
using Whole = op::Tiling<Element, VARIANT_dim, VARIANT_dim_v>;
template <class Element>
using Half = typename Whole<Element>::OneSlice;

// In f16 at 64 x 64, Q, O and scores take all registers of the loop over tiles. Other values are spilled before the
// loop and reloaded after it.
constexpr int spill_bytes = VARIANT_dim == 64 ? 192 : 0;

// Whether attention_merge may begin early. Where half blocks exist, launches of whole ones are long, and the call makes
// entries of f16 spill.
template <class Tiling>
constexpr bool merges_early = Tiling::rows == Half<typename Tiling::Element>::rows;

// Whether launches begin early, before one that does, too: heads of 32 are those of small models.
constexpr bool begins_early = VARIANT_dim == 32;

// Separate entries for whole and half blocks: launches of few blocks are bound by instruction fetch, and small entries
// have less code.
#define INSTANCE(suffix, Element, Tiling)                                                                              \
    KERNEL(ENTRY(suffix), .threads = {Tiling<Element>::threads}, .shared_bytes = sizeof(Tiling<Element>::Shared),      \
           .tile = {1, Tiling<Element>::rows, 1}, .min_blocks = Tiling<Element>::blocks, .spill_bytes = spill_bytes)   \
    (const Element *q, /* [batch, heads_kv, group, queries, dim] */                                                    \
     const Element *k, /* [batch, heads_kv, keys, dim] */                                                              \
     const Element *v, /* [batch, heads_kv, keys, dim_v] */                                                            \
     ATTENTION_ARRAYS(AS_PARAMETER) ATTENTION_SCALARS(AS_PARAMETER) int batch, int heads_kv, int group, int queries,   \
     int dim, int keys, int dim_v, int sequences, int splits, STRIDES_Q(q), STRIDES_K(k), STRIDES_K(v),                \
     ATTENTION_STRIDES(STRIDES_MASK, STRIDES_Q)) {                                                                     \
        op::let_next_begin_if(begins_early || merges_early<Tiling<Element>> && partial);                               \
        op::wait_for_launches_ahead_if<begins_early>();                                                                \
        op::attention<Tiling<Element>>(                                                                                \
            shared<typename Tiling<Element>::Shared>(),                                                                \
            {q, k, v, THE_STRIDES_Q(q), THE_STRIDES_K(k), THE_STRIDES_K(v)},                                           \
            ATTENTION_OPTIONS(nullptr, batch, heads_kv, group, queries, dim, keys, dim_v, sequences, splits));         \
    }

INSTANCE(_bf16, __nv_bfloat16, Whole)
INSTANCE(_f16, __half, Whole)
// Half blocks, where they are smaller than whole ones.
#if VARIANT_dim <= 128 && !HAS_BLOCK_SCALED_MMA
static_assert(Half<__nv_bfloat16>::rows < Whole<__nv_bfloat16>::rows);
INSTANCE(_bf16_half, __nv_bfloat16, Half)
INSTANCE(_f16_half, __half, Half)
#else
static_assert(Half<__nv_bfloat16>::rows == Whole<__nv_bfloat16>::rows);
#endif
