// pack_values_mxfp4: values, transposed, as tiles of e2m1 codes and ue8m0 scales along the keys.
#include "kernel.cuh"
#include "op/pack_entries.cuh"

VARIANTS(dim, 64, 128, 192, 256)

PACK_VALUES_MX(tile::Mxfp4, VARIANT_dim)
