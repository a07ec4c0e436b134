// Keys or values of all heads, as kernels that walk along them are given them.
#pragma once

#include <cstdint>

#include "../tile/rows.cuh"

namespace op {

// x[batch, heads, keys, cols] with strides in elements. A block of threads works on head blockIdx.y of batch blockIdx.z.
template <class Element>
struct KeyArray {
    const Element *x;
    const int *key_ends;   // [batch] or null: keys from there on are not there
    int batch, heads, keys, cols;
    int64_t batch_stride, head_stride, key_stride;

    // At most `most` keys of the block's head, from first_key on.
    __device__ tile::Rows<Element> rows(int first_key, int most) const {
        const int end = key_ends ? min(key_ends[blockIdx.z], keys) : keys;
        return {x + blockIdx.z * batch_stride + blockIdx.y * head_stride + first_key * key_stride, key_stride,
                max(min(end - first_key, most), 0), cols};
    }

    // Which of all heads that is.
    __device__ size_t head() const { return size_t(blockIdx.z) * heads + blockIdx.y; }
};

// The strides of such an array as parameters, and the array made of the parameters.
#define KEY_STRIDES(x) int64_t x##_batch, int64_t x##_head, int64_t x##_key
#define KEY_ARRAY(x) op::KeyArray{x, key_ends, batch, heads, keys, cols, x##_batch, x##_head, x##_key}

}  // namespace op
