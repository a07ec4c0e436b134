// Attention over several segments of the keys, merged: each row weighed by the sum of its exponentials.
#pragma once

#include <cstdint>

#include "../ptx/math.cuh"
#include "../tile/format.cuh"
#include "cast.cuh"

namespace op {

constexpr int merge_threads = 64;   // small, so that few rows are spread over many multiprocessors
constexpr int merge_columns = 4;   // of a thread: 16 bytes of a segment's row
constexpr int merge_tile = merge_threads * merge_columns;

// Segments [splits][batch][heads][queries][width], of which dim_v columns count, with their rows' maxima and sums [splits][batch][heads][queries].
struct Segments {
    const float *partial, *row_max, *row_sum;   // row_sum null: all are 1
    const float *exact_sum;                     // what lse is of; null: row_sum
    bool natural;                               // row_max in units of e instead of 2
    int splits;
    int64_t batch, heads, queries, width, dim_v;

    __device__ int64_t rows() const { return batch * heads * queries; }
};

// e^x for x <= 0 within 2^-21: the product with log2(e) in two parts, since a rounded one of -100 would cost 2^-18.
__device__ inline float exp_f32(float x) {
    const float high = x * 1.44269502f, low = fmaf(x, 1.44269502f, -high) + x * 1.92596299e-8f;
    return ptx::ex2_approx_ftz_f32(high) * fmaf(low, 0.693147182f, 1.0f);
}

// What the row of one segment counts, relative to the largest of all; segments without keys count nothing.
__device__ inline float segment_weight(const Segments &segments, float max, float top) {
    if (max == -INFINITY) return 0.0f;
    return segments.natural ? exp_f32(max - top) : ptx::ex2_approx_ftz_f32(max - top);
}

template <class Element, int columns>
__device__ inline void store_columns(const Strided<Element> &target, int64_t b, int64_t h, int64_t r, int64_t c,
                                     const float (&values)[columns]) {
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

// Where the results go; each may be null. With `sum` the outputs are not divided by it.
struct Merged {
    Strided<__nv_bfloat16> out_bf16;
    Strided<__half> out_f16;
    Strided<float> out_f32;
    float *lse, *max, *sum;   // [batch][heads][queries]
};

// `columns` columns of one row from `column` on, and in column 0 the row's figures.
template <int columns>
__device__ inline void merge_row(const Segments &segments, const Merged &merged, int64_t row, int64_t column) {
    const int64_t rows = segments.rows();
    float top = -INFINITY;
#pragma unroll 8   // loads of several segments are on their way at once, here and below
    for (int split = 0; split < segments.splits; ++split) top = ptx::max_nan_f32(top, segments.row_max[split * rows + row]);

    float values[columns] = {}, total = 0.0f;
#pragma unroll 8
    for (int split = 0; split < segments.splits; ++split) {
        const int64_t at = split * rows + row;
        const float weight = segment_weight(segments, segments.row_max[at], top);
        struct alignas(columns * sizeof(float)) {
            float element[columns];
        } part = *reinterpret_cast<const decltype(part) *>(segments.partial + at * segments.width + column);
        total = fmaf(weight, segments.row_sum ? segments.row_sum[at] : 1.0f, total);
#pragma unroll
        for (int i = 0; i < columns; ++i)   // what counts nothing may be anything
            values[i] = fmaf(weight, weight == 0.0f ? 0.0f : part.element[i], values[i]);
    }

    const float divide = merged.sum ? 1.0f : total == 0.0f ? 0.0f : 1.0f / total;
#pragma unroll
    for (float &value : values) value *= divide;
    const int64_t query = row % segments.queries, head = row / segments.queries % segments.heads;
    const int64_t batch = row / segments.queries / segments.heads;
    store_columns(merged.out_bf16, batch, head, query, column, values);
    store_columns(merged.out_f16, batch, head, query, column, values);
    store_columns(merged.out_f32, batch, head, query, column, values);
    if (column != 0) return;
    float exact = total;
    if (segments.exact_sum) {
        exact = 0.0f;
#pragma unroll 1   // once a row: registers are worth more
        for (int split = 0; split < segments.splits; ++split) {
            const int64_t at = split * rows + row;
            exact = fmaf(segment_weight(segments, segments.row_max[at], top), segments.exact_sum[at], exact);
        }
    }
    const float log2_total = ptx::lg2_approx_ftz_f32(exact), ln_2 = 0.693147182f;
    if (merged.lse) merged.lse[row] = segments.natural ? fmaf(log2_total, ln_2, top) : (top + log2_total) * ln_2;
    if (merged.max) merged.max[row] = top;
    if (merged.sum) merged.sum[row] = total;
}

// Merges the segments in their order. Thread i of the grid takes elements 4 i to 4 i + 3 of all rows.
__device__ inline void merge(const Segments &segments, const Merged &merged) {
    const int64_t first = (int64_t(blockIdx.x) * merge_threads + threadIdx.x) * merge_columns;
    const int64_t count = segments.rows() * segments.dim_v;
    if (first >= count) return;
    if (segments.dim_v % merge_columns == 0 && segments.width % merge_columns == 0) {
        merge_row<merge_columns>(segments, merged, first / segments.dim_v, first % segments.dim_v);
        return;
    }
    for (int64_t i = first; i < min(first + merge_columns, count); ++i)   // a piece may lie across the end of a row
        merge_row<1>(segments, merged, i / segments.dim_v, i % segments.dim_v);
}

}  // namespace op
