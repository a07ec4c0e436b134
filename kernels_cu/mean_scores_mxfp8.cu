// mean_scores_mxfp8: scores of means of queries with keys in MXFP8.
#include "kernel.cuh"
#include "op/mean_scores.cuh"

VARIANTS(dim, 32, 64, 96, 128, 192, 256)

MEAN_SCORES(UNIT, tile::Mxfp8, VARIANT_dim)
