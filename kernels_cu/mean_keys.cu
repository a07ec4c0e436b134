// mean_keys: the mean of the keys of each head from sums over runs of them.
#include "kernel.cuh"
#include "op/smooth.cuh"

KERNEL(mean_keys, .threads = {op::smooth_threads}, .shared_bytes = sizeof(op::MeanShared), .tile = {op::mean_columns, 1})
(const float *sums,       // [runs, batch, heads, cols]
 const int *key_starts,   // [sequences] or null
 const int *key_ends,     // [sequences] or null
 float *mean,             // [sequences, heads, cols]
 int keys, int runs, int batch, int heads, int cols, int sequences) {
    op::mean_keys(shared<op::MeanShared>(), sums, key_starts, key_ends, mean, keys, runs, batch, heads * cols);
}
