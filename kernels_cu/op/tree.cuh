// Partial attention added up in a tree: what a row of a run of keys gives is a node, and nodes of neighbouring runs
// make one.
//
// Chunk c is the keys 256 c .. 256 c + 255 of a sequence. Node (0, c) is that chunk, node (h, i) is node (h - 1, 2 i)
// plus node (h - 1, 2 i + 1); where the latter lies behind the last key it is the former alone. So which two floats are
// added depends on the sequence, and on nothing else.
#pragma once

#include "../kernel.cuh"
#include "softmax.cuh"

namespace op {

constexpr int chunk_keys = 256;
constexpr int node_chunks = 4;   // of a node that leaves a block
constexpr int node_keys = node_chunks * chunk_keys;

// What takes two sides under the larger maximum. Maxima are whole, so that factors are powers of two, and only sums are
// rounded. A side without keys has a maximum of -inf and zeros, and changes nothing.
struct NodeSum {
    float max, left, right;   // the maximum of both, the factors

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
