// Partial attention, summed in a tree: the result of a row over a run of keys is a node, and two neighboring nodes make
// one.
//
// Chunk c is the keys 256 c .. 256 c + 255 of a sequence. Node (0, c) is that chunk. Node (h, i) = node (h - 1, 2 i) +
// node (h - 1, 2 i + 1), or the former alone if the latter is behind the last key. So the order of additions depends on
// the sequence alone.
#pragma once

#include "../kernel.cuh"
#include "softmax.cuh"

namespace op {

constexpr int chunk_keys = 256;
constexpr int node_chunks = 4;   // of a node that a block writes
constexpr int node_keys = node_chunks * chunk_keys;

// Adds two sides relative to the larger maximum. Maxima are integers, so factors are powers of two and only the sums
// are rounded. A side without keys has a maximum of -inf and zeros, and changes nothing.
struct NodeSum {
    float max, left, right;   // the larger maximum; the factor of each side

    __device__ NodeSum(float left_max, float right_max)
        : max(ptx::max_nan_f32(left_max, right_max)), left(factor(left_max, max)), right(factor(right_max, max)) {}

    __device__ static float factor(float of, float max) {
        return max != max ? max : power_of_two(of == max ? 0.0f : of - max);   // NaN stays
    }
    __device__ float add(float left_value, float right_value) const {
        return fmaf(left_value, left, right_value * right);
    }
};

}   // namespace op
