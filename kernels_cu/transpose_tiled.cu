// transpose_tiled: y[cols][rows] from x[rows][cols] through a padded tile in shared memory.
#include "kernel.cuh"
#include "op/transpose.cuh"

KERNEL(transpose_tiled, .threads = {op::transpose_tile, op::transpose_rows},
       .shared_bytes = sizeof(op::TransposeShared), .tile = {op::transpose_tile, op::transpose_tile})
(const float *x,   // [rows, cols]
 float *y,         // [cols, rows]
 int rows, int cols) {
    op::transpose_tiled(shared<op::TransposeShared>(), x, y, rows, cols);
}
