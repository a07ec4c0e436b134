// pad_last: rows of bytes cut or padded with zeros to another length.
#include "kernel.cuh"
#include "op/layout.cuh"

KERNEL(pad_last, .threads = {op::layout_threads}, .tile = {op::layout_tile})
(const uint8_t *x,   // [rows, source_bytes]
 uint8_t *y,         // [rows, target_bytes]
 int64_t rows, int64_t source_bytes, int64_t target_bytes) {
    op::pad_last(x, y, rows, source_bytes, target_bytes);
}
