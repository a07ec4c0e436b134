// fill_f32: a float32 array of one value.
#include "kernel.cuh"
#include "op/layout.cuh"

KERNEL(fill_f32, .threads = {op::layout_threads}, .tile = {op::layout_threads})
(float *x,   // [count]
 float value, int64_t count) {
    op::fill(x, value, count);
}
