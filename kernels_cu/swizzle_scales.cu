// swizzle_scales: block scales from rows into the 128 x 4 tiles of cuBLAS and CUTLASS, padded with 0x00.
#include "kernel.cuh"
#include "op/layout.cuh"

KERNEL(swizzle_scales, .threads = {op::layout_threads}, .tile = {op::layout_tile})
(const uint8_t *scales,   // [outer, blocks, cols]
 uint8_t *swizzled,       // [bytes]
 int64_t outer, int64_t blocks, int64_t cols, int64_t bytes) {
    op::swizzle_scales(scales, swizzled, {size_t(outer), size_t(blocks), size_t(cols)}, bytes);
}
