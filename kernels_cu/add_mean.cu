// add_mean: rows plus the mean vector of their sequence, head and run of rows.
#include "kernel.cuh"
#include "op/smooth.cuh"

KERNEL(add_mean, .threads = {128}, .tile = {1, 1, 1})
(const float *x,          // [batch, heads, keys, width]
 const float *mean,       // [means, heads, blocks, cols]
 const int *key_starts,   // [sequences] or null
 float *y,                // [batch, heads, keys, cols]
 int run, int batch, int heads, int keys, int width, int means, int blocks, int cols, int sequences, KEY_STRIDES(x)) {
    op::add_mean(op::KeyArray{x, key_starts, nullptr, batch, heads, keys, cols, sequences, x_batch, x_head, x_key},
                 mean, y, run, key_starts && means < sequences, blocks, cols);
}
