// add_mean: rows, each with the vector of its sequence, head and run of rows added.
#include "kernel.cuh"
#include "op/smooth.cuh"

KERNEL(add_mean, .threads = {128}, .tile = {1, 1, 1})
(const float *x,          // [batch, heads, keys, width]
 const float *mean,       // [means, heads, blocks, cols]
 const int *key_starts,   // [sequences] or null
 float *y,                // [batch, heads, keys, cols]
 int run, int batch, int heads, int keys, int width, int means, int blocks, int cols, int sequences, KEY_STRIDES(x)) {
    const int *key_ends = nullptr;
    op::add_mean(KEY_ARRAY(x), mean, y, run, key_starts && means < sequences, blocks, cols);
}
