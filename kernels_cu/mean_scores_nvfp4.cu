// mean_scores_nvfp4: scores of means of queries with keys in NVFP4.
#include "kernel.cuh"
#include "op/mean_scores.cuh"

VARIANTS(dim, 64, 128, 192, 256)

MEAN_SCORES(UNIT, tile::Nvfp4, VARIANT_dim)
