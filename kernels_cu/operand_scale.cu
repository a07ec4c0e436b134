// operand_scale: the global scale of an attention operand in NVFP4, a power of two over 6.
#include "kernel.cuh"
#include "op/smooth.cuh"

KERNEL(operand_scale, .threads = {op::smooth_threads}, .shared_bytes = sizeof(op::ScanShared), .tile = {1})
(const float *largest,   // [count]
 float *global_scale,    // [1]
 float factor, int count) {
    op::operand_scale(shared<op::ScanShared>(), largest, global_scale, factor, count);
}
