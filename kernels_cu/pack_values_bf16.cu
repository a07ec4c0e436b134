// pack_values_bf16: values as tiles of rows in bf16.
#include "kernel.cuh"
#include "op/pack.cuh"

VARIANTS(dim, 32, 64, 96, 128, 192, 256)

#define INSTANCE(suffix, Element)                                                                                      \
    KERNEL(ENTRY(suffix), .threads = {tile::RowPacking<tile::tile_keys, VARIANT_dim, 8>::threads}, .tile = {1, 1, 1})  \
    (const Element *x,      /* [batch, heads, keys, cols] */                                                           \
     const int *key_starts, /* [sequences] or null */                                                                  \
     const int *key_ends,   /* [sequences] or null */                                                                  \
     uint8_t *packed,       /* [batch, heads, tiles, tile_bytes] */                                                    \
     PACK_AXES(x)) {                                                                                                   \
        op::pack_values_16<__nv_bfloat16, VARIANT_dim>(                                                                \
            op::KeyArray{x, key_starts, key_ends, batch, heads, keys, cols, sequences, x_batch, x_head, x_key},        \
            {packed, tiles});                                                                                          \
    }

INSTANCE(_f32, float)
INSTANCE(_f16, __half)
INSTANCE(_bf16, __nv_bfloat16)
