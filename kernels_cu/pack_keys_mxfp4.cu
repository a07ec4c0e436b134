// pack_keys_mxfp4: keys as tiles of e2m1 codes and ue8m0 scales along the head dimension.
#include "kernel.cuh"
#include "op/pack_entries.cuh"

VARIANTS(dim, 64, 128, 192, 256)

PACK_KEYS_MX(tile::Mxfp4, VARIANT_dim)
