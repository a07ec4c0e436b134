// add_mean: rows, each with the vector of its sequence, head and run of rows added.
#include "kernel.cuh"
#include "op/smooth.cuh"

KERNEL(add_mean, .threads = {128}, .tile = {1, 1, 1})
(const float *x,          // [batch, heads, keys, width]
 const float *mean,       // [sequences, heads, blocks, cols]
 const int *key_starts,   // [sequences] or null
 float *y,                // [batch, heads, keys, cols]
 int run, int batch, int heads, int keys, int width, int sequences, int blocks, int cols, KEY_STRIDES(x)) {
    const int *key_ends = nullptr;
    op::add_mean(KEY_ARRAY(x), mean, y, run, blocks, cols);
}
