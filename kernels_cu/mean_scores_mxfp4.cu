// mean_scores_mxfp4: scores of means of queries with keys in MXFP4.
#include "kernel.cuh"
#include "op/mean_scores.cuh"

VARIANTS(dim, 64, 128, 192, 256)

MEAN_SCORES(UNIT, tile::Mxfp4, VARIANT_dim)
