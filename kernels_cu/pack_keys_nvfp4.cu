// pack_keys_nvfp4: keys as tiles of e2m1 codes and ue4m3 scales along the head dimension.
#include "kernel.cuh"
#include "op/pack.cuh"

VARIANTS(dim, 64, 128, 192, 256)

using Tile = tile::KeyTile<tile::Nvfp4, tile::tile_keys, VARIANT_dim>;
using Packing = tile::KeyPacking<Tile>;
template <class Element>
using Shared = op::PackShared<Tile, Element, VARIANT_dim>;

#define INSTANCE(suffix, Element)                                                                                      \
    KERNEL(ENTRY(suffix), .threads = {Packing::threads}, .shared_bytes = sizeof(Shared<Element>), .tile = {1, 1, 1},   \
           .min_blocks = Packing::blocks)                                                                              \
    (const Element *x,          /* [batch, heads, keys, cols] */                                                       \
     const float *mean,         /* [sequences, heads, cols] or null */                                                 \
     const float *global_scale, /* [1] or null */                                                                      \
     const int *key_starts,     /* [sequences] or null */                                                              \
     const int *key_ends,       /* [sequences] or null */                                                              \
     uint8_t *packed,           /* [batch, heads, tiles, tile_bytes] */                                                \
     int rule, PACK_AXES(x)) {                                                                                         \
        op::pack_keys(                                                                                                 \
            shared<Shared<Element>>(),                                                                                 \
            op::KeyArray{x, key_starts, key_ends, batch, heads, keys, cols, sequences, x_batch, x_head, x_key},        \
            {packed, tiles}, mean, rule, global_scale);                                                                \
    }

INSTANCE(_f32, float)
INSTANCE(_f16, __half)
INSTANCE(_bf16, __nv_bfloat16)
