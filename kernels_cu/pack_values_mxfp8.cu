// pack_values_mxfp8: values, transposed, as tiles of e4m3 codes and ue8m0 scales along the keys.
#include "kernel.cuh"
#include "op/pack.cuh"

VARIANTS(dim, 32, 64, 96, 128, 192, 256)

using Tile = tile::ValueTile<tile::Mxfp8, op::tile_keys, VARIANT_dim>;
using Packing = tile::ValuePacking<Tile>;
template <class Element>
using Shared = op::PackShared<Tile, Element, VARIANT_dim>;

#define INSTANCE(suffix, Element)                                                                                      \
    KERNEL(JOIN(pack_values_mxfp8_dim, VARIANT_dim, suffix), .threads = {Packing::threads},                            \
           .shared_bytes = sizeof(Shared<Element>), .tile = {1, 1, 1}, .min_blocks = Packing::blocks)                  \
    (const Element *x,            /* [batch, heads, keys, cols] */                                                     \
     const int *key_starts,       /* [sequences] or null */                                                            \
     const int *key_ends,         /* [sequences] or null */                                                            \
     uint8_t *packed,             /* [batch, heads, tiles, tile_bytes] */                                              \
     int rule, PACK_AXES(x)) {                                                                                         \
        op::pack_values(shared<Shared<Element>>(), KEY_ARRAY(x), {packed, tiles}, rule, nullptr);  \
    }

INSTANCE(_f32, float)
INSTANCE(_f16, __half)
INSTANCE(_bf16, __nv_bfloat16)
