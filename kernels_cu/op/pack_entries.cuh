// The entries of pack_keys_* and pack_values_* in MX formats, one for each type of x.
#pragma once

#include "pack.cuh"

#define PACK_KEYS_MX_INSTANCE(suffix, Element, Format, dim)                                                            \
    KERNEL(ENTRY(suffix), .threads = {tile::KeyPacking<tile::KeyTile<Format, tile::tile_keys, dim>>::threads},         \
           .shared_bytes = sizeof(op::PackShared<tile::KeyTile<Format, tile::tile_keys, dim>, Element, dim>),          \
           .tile = {1, 1, 1}, .min_blocks = tile::KeyPacking<tile::KeyTile<Format, tile::tile_keys, dim>>::blocks)     \
    (const Element *x,      /* [batch, heads, keys, cols] */                                                           \
     const float *mean,     /* [sequences, heads, cols] or null */                                                     \
     const int *key_starts, /* [sequences] or null */                                                                  \
     const int *key_ends,   /* [sequences] or null */                                                                  \
     uint8_t *packed,       /* [batch, heads, tiles, tile_bytes]: tile::KeyTile */                                     \
     int rule, PACK_AXES(x)) {                                                                                         \
        using Tile = tile::KeyTile<Format, tile::tile_keys, dim>;                                                      \
        op::pack_keys(                                                                                                 \
            shared<op::PackShared<Tile, Element, dim>>(),                                                              \
            op::KeyArray{x, key_starts, key_ends, batch, heads, keys, cols, sequences, x_batch, x_head, x_key},        \
            {packed, tiles}, mean, rule, nullptr);                                                                     \
    }

#define PACK_KEYS_MX(Format, dim)                                                                                      \
    PACK_KEYS_MX_INSTANCE(_f32, float, Format, dim)                                                                    \
    PACK_KEYS_MX_INSTANCE(_f16, __half, Format, dim)                                                                   \
    PACK_KEYS_MX_INSTANCE(_bf16, __nv_bfloat16, Format, dim)

#define PACK_VALUES_MX_INSTANCE(suffix, Element, Format, dim)                                                          \
    KERNEL(ENTRY(suffix), .threads = {tile::ValuePacking<tile::ValueTile<Format, tile::tile_keys, dim>>::threads},     \
           .shared_bytes = sizeof(op::PackShared<tile::ValueTile<Format, tile::tile_keys, dim>, Element, dim>),        \
           .tile = {1, 1, 1}, .min_blocks = tile::ValuePacking<tile::ValueTile<Format, tile::tile_keys, dim>>::blocks) \
    (const Element *x,      /* [batch, heads, keys, cols] */                                                           \
     const int *key_starts, /* [sequences] or null */                                                                  \
     const int *key_ends,   /* [sequences] or null */                                                                  \
     uint8_t *packed,       /* [batch, heads, tiles, tile_bytes]: tile::ValueTile */                                   \
     int rule, PACK_AXES(x)) {                                                                                         \
        using Tile = tile::ValueTile<Format, tile::tile_keys, dim>;                                                    \
        op::pack_values(                                                                                               \
            shared<op::PackShared<Tile, Element, dim>>(),                                                              \
            op::KeyArray{x, key_starts, key_ends, batch, heads, keys, cols, sequences, x_batch, x_head, x_key},        \
            {packed, tiles}, rule, nullptr);                                                                           \
    }

#define PACK_VALUES_MX(Format, dim)                                                                                    \
    PACK_VALUES_MX_INSTANCE(_f32, float, Format, dim)                                                                  \
    PACK_VALUES_MX_INSTANCE(_f16, __half, Format, dim)                                                                 \
    PACK_VALUES_MX_INSTANCE(_bf16, __nv_bfloat16, Format, dim)
