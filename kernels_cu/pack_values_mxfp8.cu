// pack_values_mxfp8: values, transposed, as tiles of e4m3 codes and ue8m0 scales along the keys.
#include "kernel.cuh"
#include "op/pack_entries.cuh"

VARIANTS(dim, 32, 64, 96, 128, 192, 256)

PACK_VALUES_MX(tile::Mxfp8, VARIANT_dim)
