// Keys or values of all heads, as arguments of kernels that loop over keys.
#pragma once

#include <cstdint>

#include "../tile/rows.cuh"
#include "sequences.cuh"

namespace op {

// At most `keys` keys of a sequence. `first` counts in the whole array.
struct KeyUnit {
    int sequence, first, keys;
};

// x[batch, heads, keys, cols] with strides in elements. A block of threads works on head blockIdx.y of batch
// blockIdx.z. Sequence i is batch i or, where there are key_starts, keys key_starts[i] .. key_ends[i] - 1 of a batch of
// one.
template <class Element>
struct KeyArray {
    const Element *x;        // [batch, heads, keys, cols]
    const int *key_starts;   // [sequences] or null
    const int *key_ends;     // [sequences] or null: where the keys of a sequence end
    int batch, heads, keys, cols, sequences;
    int64_t batch_stride, head_stride, key_stride;
    bool backwards = false;   // blocks start with the last head: the next kernel finds the first heads in the cache

    __device__ int batch_of_block() const { return backwards ? batch - 1 - blockIdx.z : blockIdx.z; }
    __device__ int head_of_block() const { return backwards ? heads - 1 - blockIdx.y : blockIdx.y; }

    // Unit number `index` of `size` keys. A unit of no sequence has no keys.
    __device__ KeyUnit unit(int index, int size) const {
        int sequence = batch_of_block(), start = 0, first = index * size;
        if (key_starts) {
            sequence =
                last_sequence(sequences, index, [&](int i) { return first_unit(__ldg(key_starts + i), i, size); });
            start = __ldg(key_starts + sequence);
            first = start + (index - first_unit(start, sequence, size)) * size;
        }
        const int end = key_ends ? min(key_ends[sequence], keys) : keys;
        return {sequence, first, first < start ? 0 : max(min(end - first, size), 0)};
    }

    // The keys of a unit, of the block's head.
    __device__ tile::Rows<Element> rows(const KeyUnit &unit) const {
        return {x + batch_of_block() * batch_stride + head_of_block() * head_stride + unit.first * key_stride,
                key_stride, unit.keys, cols};
    }

    // The block's head, counted over all batches, and over all sequences.
    __device__ size_t head() const { return head(batch_of_block()); }
    __device__ size_t head(int sequence) const { return size_t(sequence) * heads + head_of_block(); }
};

// The strides of such an array as parameters of an entry.
#define KEY_STRIDES(x) int64_t x##_batch, int64_t x##_head, int64_t x##_key

}   // namespace op
