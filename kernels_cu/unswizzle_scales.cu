// unswizzle_scales: block scales from the 128 x 4 tiles of cuBLAS and CUTLASS back into rows.
#include "kernel.cuh"
#include "op/layout.cuh"

KERNEL(unswizzle_scales, .threads = {op::layout_threads}, .tile = {op::layout_tile})
(const uint8_t *swizzled,   // [bytes]
 uint8_t *scales,           // [outer, blocks, cols]
 int64_t bytes, int64_t outer, int64_t blocks, int64_t cols) {
    op::unswizzle_scales(swizzled, scales, bytes, {size_t(outer), size_t(blocks), size_t(cols)});
}
