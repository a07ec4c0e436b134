// pack_values_nvfp4: values, transposed, as tiles of e2m1 codes and ue4m3 scales along the keys.
#include "kernel.cuh"
#include "op/pack.cuh"

VARIANTS(dim, 64, 128)

using Tile = tile::ValueTile<tile::Nvfp4, op::tile_keys, VARIANT_dim>;

#define INSTANCE(suffix, Element)                                                                                      \
    KERNEL(JOIN(pack_values_nvfp4_dim, VARIANT_dim, suffix), .threads = {tile::ValuePacking<Tile, Element>::threads},  \
           .shared_bytes = sizeof(op::PackValuesShared<Tile, Element>), .tile = {1, 1, 1},                             \
           .min_blocks = tile::ValuePacking<Tile, Element>::blocks)                                                    \
    (const Element *x,            /* [batch, heads, keys, cols] */                                                     \
     const float *global_scale,   /* [1] or null */                                                                    \
     const int *key_ends,         /* [batch] or null */                                                                \
     uint8_t *packed,             /* [batch, heads, tiles, tile_bytes] */                                              \
     int rule, PACK_AXES(x)) {                                                                                         \
        op::pack_values(shared<op::PackValuesShared<Tile, Element>>(), KEY_ARRAY(x), {packed, tiles}, rule, global_scale);\
    }

INSTANCE(_f32, float)
INSTANCE(_f16, __half)
INSTANCE(_bf16, __nv_bfloat16)
