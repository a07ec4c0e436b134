// Elementwise kernels on rows: rows of a table, activations, and gates, which compute one value from two.
#pragma once

#include <cstdint>

#include "activation.cuh"
#include "produce.cuh"

namespace op {

// y[rows, cols] = activation(x[rows, cols]).
template <class Element>
__device__ inline void activate_rows(const Element *x, int64_t stride, Activation activation, const Produced &y) {
    using Raw = RowShares<Element, 1>;
    produce_shares<Element, Raw, true>(
        y, is_whole_rows(x, stride, y.cols),
        [&](auto whole, auto row, int column, Raw &raw) { raw.template load<whole>(x + row * stride, column, y.cols); },
        [&](const Raw &raw, auto, float (&values)[2][8], auto &&taken) {
            raw.unpack(0, values);
            taken();
            activate(values, activation);
        });
}

// y[rows, cols] = table[ids[row]] of table[entries, cols]; zeros if ids[row] is out of range.
template <class Element>
__device__ inline void take_rows(const Element *table, int64_t stride, int entries, const int *ids, const Produced &y) {
    using Raw = RowShares<Element, 1>;
    produce_shares<Element, Raw>(
        y, is_whole_rows(table, stride, y.cols),
        [&](auto whole, auto row, int column, Raw &raw) {
            const int id = ids[row];
            if (id >= 0 && id < entries) raw.template load<whole>(table + id * stride, column, y.cols);
            else raw.clear();
        },
        [&](const Raw &raw, auto, float (&values)[2][8], auto &&taken) {
            raw.unpack(0, values);
            taken();
        });
}

// y[rows, cols] = gate(g, u) weights[rows] of x[rows, 2 cols], whose columns are g, then u; if `interleaved`, the g and
// u of each column are neighbors. weights may be null. rounds: results are rounded to x's type first.
template <class Element>
__device__ inline void gate_rows(const Element *x, int64_t stride, bool interleaved, const Gate &gate,
                                 const float *weights, bool rounds, const Produced &y) {
    struct Raw {
        RowShares<Element, 1> part[2];   // g and u; interleaved: both of the first eight columns, then of the others
    };
    const int apart = interleaved ? produce_share : y.cols, width = interleaved ? 2 * y.cols : y.cols;
    produce_shares<Element, Raw, true>(
        y, is_whole_rows(x, stride, y.cols),
        [&](auto whole, auto row, int column, Raw &raw) {
            const Element *source = x + row * stride;
            const int at = interleaved ? 2 * column : column;
            raw.part[0].template load<whole>(source, at, width);
            raw.part[1].template load<whole>(source + apart, at, interleaved ? width - apart : width);
        },
        [&](const Raw &raw, auto row, float (&values)[2][8], auto &&taken) {
            float one[2][8], other[2][8];
            raw.part[0].unpack(0, one);
            raw.part[1].unpack(0, other);
            taken();
            const auto make = [&](const Gate &gate) {
#pragma unroll
                for (int i = 0; i < 16; ++i) {
                    const int pair = i % 8 * 2;
                    const float (&both)[2][8] = i < 8 ? one : other;
                    values[i / 8][i % 8] = gate(interleaved ? both[pair / 8][pair % 8] : one[i / 8][i % 8],
                                                interleaved ? both[pair / 8][pair % 8 + 1] : other[i / 8][i % 8]);
                }
            };
            if (gate.limit == INFINITY)
                make({INFINITY, gate.alpha, gate.offset});   // a constant limit saves the comparisons
            else make(gate);
            if (weights) {
                const float weight = weights[y.present(row)];
#pragma unroll
                for (int i = 0; i < 16; ++i) values[i / 8][i % 8] *= weight;
            }
            if (rounds) round_values<Element>(values);
        });
}

}   // namespace op
