// copy_bytes: copies elements of any size between arrays with any strides.
#include "kernel.cuh"
#include "op/copy.cuh"

KERNEL(copy_bytes, .threads = {op::copy_threads}, .tile = {op::copy_tile, 1, 1})
(const uint8_t *x,   // [batch, heads, rows, width]
 uint8_t *y,         // the same
 int batch, int heads, int64_t rows, int64_t width, int64_t x_batch, int64_t x_head, int64_t x_row, int64_t x_column,
 int64_t y_batch, int64_t y_head, int64_t y_row, int64_t y_column) {
    op::copy_rows({x, x_batch, x_head, x_row, x_column}, {y, y_batch, y_head, y_row, y_column}, rows, width);
}
