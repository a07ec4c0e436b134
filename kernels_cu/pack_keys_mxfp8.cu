// pack_keys_mxfp8: keys as tiles of e4m3 codes and ue8m0 scales along the head dimension.
#include "kernel.cuh"
#include "op/pack_entries.cuh"

VARIANTS(dim, 32, 64, 96, 128, 192, 256)

PACK_KEYS_MX(tile::Mxfp8, VARIANT_dim)
