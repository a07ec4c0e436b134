// Attention on operands of 16 bits with what caches of keys add to scores. The kernel of other calls does not pay for
// it: a factor from memory costs it a register.
#pragma once

#include "attention.cuh"

namespace op {

// k_global: [heads_kv], factors of the scores of each head, or null.
template <class Tiling>
__device__ inline void adjusted_attention(typename Tiling::Shared &shared,
                                          const FloatOperands<typename Tiling::Element> &operands,
                                          AttentionOptions options, const float *k_global) {
    if (k_global) options.scale *= k_global[blockIdx.x % options.heads_kv];   // the head, as Problem finds it
    attention<Tiling>(shared, operands, options);
}

}   // namespace op
