// Parts of merging attention over several segments of the keys: each row is weighted by its sum of exponentials, in the
// tree of tree.cuh.
#pragma once

#include <cstdint>

#include "../kernel.cuh"
#include "../ptx/math.cuh"
#include "../tile/format.cuh"
#include "cast.cuh"
#include "problem.cuh"
#include "tree.cuh"

namespace op {

constexpr int merge_columns = 4;   // of a thread: 16 bytes of a segment's row
constexpr int merge_batch = 4;     // segments that a thread loads at once
constexpr int merge_threads = 128;
constexpr int merge_tile = merge_threads * merge_columns;

// Some columns of a row of a node: values, row_sum and exact_sum.
template <int columns>
struct Piece {
    float max, value[columns + 2];

    // The neutral element of with().
    __device__ static Piece none() { return {-INFINITY, {}}; }

    __device__ Piece with(const Piece &right) const {
        const NodeSum sum(max, right.max);
        Piece result{sum.max, {}};
#pragma unroll
        for (int i = 0; i < columns + 2; ++i) result.value[i] = sum.add(value[i], right.value[i]);
        return result;
    }

    // Each number replaced by body(number).
    template <class Body>
    __device__ Piece each(Body &&body) const {
        Piece result{body(max), {}};
#pragma unroll
        for (int i = 0; i < columns + 2; ++i) result.value[i] = body(value[i]);
        return result;
    }
};

// The segments, with the maxima and sums of their rows. The first dim_v columns are merged.
struct Segments {
    const float *partial;     // [splits, batch, heads, queries, width]
    const float *row_max;     // [splits, batch, heads, queries]
    const float *row_sum;     // [splits, batch, heads, queries] or null: all are 1
    const float *exact_sum;   // [splits, batch, heads, queries]: the sums for lse; null: row_sum
    const float *sinks;       // [heads]: one logit per head that joins the sums, or null
    const float *row_shift;   // [batch, heads, queries]: what is missing from scaled scores, or null
    const float *v_global;    // [heads_kv]: factors of the outputs, or null
    bool natural;             // row_max in units of e instead of 2
    bool complete;            // partial is written where row_max is -inf, too
    int splits;
    int64_t batch, heads, queries, heads_kv, width, dim_v;

    __device__ int64_t rows() const { return batch * heads * queries; }
};

// e^x for x <= 0, within 2^-21. The product with log2(e) has two parts: rounded to one, it would cost 2^-18 at -100.
__device__ inline float exp_f32(float x) {
    const float high = x * 1.44269502f, low = fmaf(x, 1.44269502f, -high) + x * 1.92596299e-8f;
    return ptx::ex2_approx_ftz_f32(high) * fmaf(low, 0.693147182f, 1.0f);
}

template <class Element, int columns, class Value>
__device__ inline void store_columns(const Strided<Element> &target, int64_t b, int64_t h, int64_t r, int64_t c,
                                     const Value (&values)[columns]) {
    if (!target.data) return;
    Element *first = target.at(b, h, r, c);
    if (columns > 1 && target.is_whole(first, columns * sizeof(Element))) {
        struct alignas(columns * sizeof(Element)) {
            Element element[columns];
        } packed;
#pragma unroll
        for (int i = 0; i < columns; ++i) packed.element[i] = Element(values[i]);
        *reinterpret_cast<decltype(packed) *>(first) = packed;
    } else {
#pragma unroll
        for (int i = 0; i < columns; ++i) first[i * target.column] = Element(values[i]);
    }
}

// The outputs, each of which may be null. If `sum` is one of them, the others are not divided by it.
struct Merged {
    Strided<__nv_bfloat16> out_bf16;   // [batch, heads, queries, dim_v], as the next two
    Strided<__half> out_f16;
    Strided<float> out_f32;
    float *lse, *max, *sum;   // [batch, heads, queries]
};

// What joins the sum of all segments of a row, and where its sums go. Any may be null.
struct RowEnding {
    const float *sink, *shift, *v_global;   // as in Segments
    float *lse, *max, *sum;                 // as in Merged
};

// Turns the sum of all segments of a row into `columns` outputs for store(values). If `with_sums`, it also writes the
// row's maximum and sums. `top` is the largest logarithm if maxima are `natural`.
template <int columns, class Store>
__device__ inline void finish_piece(const RowEnding &row, Piece<columns> node, bool natural, float top, bool with_sums,
                                    Store &&store) {
    // Add the row's shift, and its sink.
    float shift = 0.0f;   // of all scores, in units of log2
    if (row.shift && node.value[columns] != 0.0f) shift = *row.shift * log2_e;
    const float whole_shift = ceilf(shift), part_shift = shift - whole_shift;
    if (row.sink) {   // one more key, without a value
        const float sink = *row.sink * log2_e - shift, max = ptx::max_nan_f32(node.max, ceilf(sink));
        const float share = sink == -INFINITY ? 0.0f : ptx::ex2_approx_ftz_f32(sink - max);
        Piece<columns> of_sink{max, {}};
        of_sink.value[columns] = of_sink.value[columns + 1] = share;
        node = node.with(of_sink);
    }
    // Write the output, and with its first column the row's maximum and sums.
    const float total = node.value[columns], exact = node.value[columns + 1];
    float factor = row.sum ? 1.0f : total == 0.0f ? 0.0f : 1.0f / total;
    if (row.v_global) factor *= *row.v_global;
    // Maxima are integers: the fraction of the shift scales the sums and outputs that are relative to them.
    const float part = row.sum && part_shift != 0.0f ? ptx::ex2_approx_ftz_f32(part_shift) : 1.0f;
    float values[columns];
#pragma unroll
    for (int i = 0; i < columns; ++i) values[i] = node.value[i] * (factor * part);
    store(values);
    if (!with_sums) return;
    const float log2_total = ptx::lg2_approx_ftz_f32(exact);
    if (row.lse) {
        const float max = natural ? top : (node.max + log2_total + shift) * ln_2;
        *row.lse = exact == 0.0f ? -INFINITY : natural ? fmaf(log2_total, ln_2, max) : max;
    }
    if (row.max) *row.max = total == 0.0f ? -INFINITY : (natural ? top : node.max) + whole_shift;
    if (row.sum) *row.sum = total * part;
}

// How many lanes share a piece: enough to load up to 64 segments at once.
__device__ inline int merge_team(int splits) {
    const int least = ceil_div(splits, merge_batch);
    return least > 8 ? 16 : least > 4 ? 8 : least > 2 ? 4 : least;
}

}   // namespace op
