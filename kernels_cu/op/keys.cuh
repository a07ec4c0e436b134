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
    bool backwards = false;   // blocks start from the last head: who reads the same afterwards finds the first in the cache

    __device__ int batch_of_block() const { return backwards ? batch - 1 - blockIdx.z : blockIdx.z; }
    __device__ int head_of_block() const { return backwards ? heads - 1 - blockIdx.y : blockIdx.y; }

    // At most `most` keys of the block's head, from first_key on.
    __device__ tile::Rows<Element> rows(int first_key, int most) const {
        const int end = key_ends ? min(key_ends[batch_of_block()], keys) : keys;
        return {x + batch_of_block() * batch_stride + head_of_block() * head_stride + first_key * key_stride, key_stride,
                max(min(end - first_key, most), 0), cols};
    }

    // Which of all heads that is.
    __device__ size_t head() const { return size_t(batch_of_block()) * heads + head_of_block(); }
};

// The strides of such an array as parameters, and the array made of the parameters.
#define KEY_STRIDES(x) int64_t x##_batch, int64_t x##_head, int64_t x##_key
#define KEY_ARRAY(x) op::KeyArray{x, key_ends, batch, heads, keys, cols, x##_batch, x##_head, x##_key}

}  // namespace op
