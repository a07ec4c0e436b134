// transpose_naive: y[cols][rows] from x[rows][cols], the simplest kernel that has two array arguments.
#include "kernel.cuh"
#include "op/transpose.cuh"

KERNEL(transpose_naive, .threads = {op::transpose_tile, op::transpose_rows},
       .tile = {op::transpose_tile, op::transpose_tile})
(const float *x,   // [rows, cols]
 float *y,         // [cols, rows]
 int rows, int cols) {
    op::transpose_naive(x, y, rows, cols);
}
