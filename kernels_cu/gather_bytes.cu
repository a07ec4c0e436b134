// gather_bytes: the bytes at a list of places of every row.
#include "kernel.cuh"
#include "op/layout.cuh"

KERNEL(gather_bytes, .threads = {op::layout_threads}, .tile = {op::layout_tile})
(const uint8_t *x,    // [rows, width]
 const int *places,   // [count]
 uint8_t *y,          // [rows, count]
 int64_t rows, int64_t width, int64_t count) {
    op::gather_bytes(x, places, y, rows, width, count);
}
