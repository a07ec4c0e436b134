// mean_keys: the mean of the keys of each head from sums over runs of them, and the global scale from their largest
// magnitudes.
#include "kernel.cuh"
#include "op/smooth.cuh"

KERNEL(mean_keys, .threads = {op::smooth_threads}, .shared_bytes = sizeof(op::ScanShared),
       .tile = {op::mean_columns, 1})
(const float *sums,       // [runs, batch, heads, cols]
 const int *key_starts,   // [sequences] or null
 const int *key_ends,     // [sequences] or null
 const float *largest,    // [runs, batch, heads] or null
 float *mean,             // [sequences, heads, cols]
 float *global_scale,     // [1] or null
 int keys, float factor, int runs, int batch, int heads, int cols, int sequences) {
    op::mean_keys(shared<op::MeanShared>(), sums, key_starts, key_ends, mean, keys, runs, batch, heads * cols);
    op::operand_scale_too(shared<op::ScanShared>(), largest, global_scale, factor, runs * batch * heads);
}
