// nvfp4_global_scale: the second-level scale of an array in NVFP4 from the parts of its amax.
#include "kernel.cuh"
#include "op/reduce.cuh"

KERNEL(nvfp4_global_scale, .threads = {op::reduce_threads}, .shared_bytes = sizeof(op::ReduceShared), .tile = {1})
(const float *partial,   // [blocks]
 float *global_scale,    // [1]
 int64_t blocks) {
    op::nvfp4_global_scale(shared<op::ReduceShared>(), partial, global_scale, blocks);
}
