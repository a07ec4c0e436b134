// Activations of rows, and gates: of a value, or of a pair of them, one.
#pragma once

#include <cstdint>

#include "activation.cuh"
#include "produce.cuh"

namespace op {

// y[rows, cols] = activation(x[rows, cols]).
template <class Element>
__device__ inline void activate_rows(const Element *x, int64_t stride, Activation activation, const Produced &y) {
    produce_shares(y, [&](int64_t row, int column, float (&values)[2][8]) {
        RowShares<Element, 1> share;
        share.load(x + row * stride, row < y.rows, column, 0, y.cols);
        share.unpack(0, values);
        activate(values, activation);
    });
}

// y[rows, cols] of x[rows, 2 cols]: gate columns and then what they gate, or the two of each column side by side; times
// weights[rows] where there are any, and then rounded to x's type where `rounds` says so.
template <class Element>
__device__ inline void gate_rows(const Element *x, int64_t stride, bool interleaved, const Gate &gate,
                                 const float *weights, bool rounds, const Produced &y) {
    produce_shares(y, [&](int64_t row, int column, float (&values)[2][8]) {
        const Element *source = x + row * stride;
        const bool present = row < y.rows;
        if (interleaved) {
            RowShares<Element, 2> pairs;
            pairs.load(source, present, 2 * column, produce_share, 2 * y.cols);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float both[2][8];
                pairs.unpack(half, both);
#pragma unroll
                for (int i = 0; i < 8; ++i) values[half][i] = gate(both[i / 4][i % 4 * 2], both[i / 4][i % 4 * 2 + 1]);
            }
        } else {
            RowShares<Element, 1> gates, ups;
            gates.load(source, present, column, 0, y.cols);
            ups.load(source + y.cols, present, column, 0, y.cols);
            float up[2][8];
            gates.unpack(0, values);
            ups.unpack(0, up);
#pragma unroll
            for (int i = 0; i < 16; ++i) values[i / 8][i % 8] = gate(values[i / 8][i % 8], up[i / 8][i % 8]);
        }
        const float weight = weights && present ? weights[row] : 1.0f;
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            float &value = values[i / 8][i % 8];
            if (weights) value *= weight;
            if (rounds) value = rounded<Element>(value);
        }
    });
}

}  // namespace op
