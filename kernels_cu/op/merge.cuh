// Attention over several segments of the keys, merged: each row weighed by the sum of its exponentials.
#pragma once

#include <cstdint>

#include "../kernel.cuh"
#include "../ptx/barrier.cuh"
#include "../ptx/math.cuh"
#include "../tile/format.cuh"
#include "cast.cuh"

namespace op {

constexpr int merge_columns = 4;   // of a thread: 16 bytes of a segment's row
constexpr int merge_pieces = 64;   // of so many columns, of a block: few, so that few rows are spread over many multiprocessors
constexpr int merge_runs = 4;      // of segments, each summed by threads of its own
constexpr int merge_batch = 4;     // segments of which a thread has loads on their way at once
constexpr int merge_threads = merge_pieces * merge_runs;
constexpr int merge_tile = merge_pieces * merge_columns;

struct MergeShared {
    float max[merge_runs][merge_pieces];
    float sum[merge_runs][merge_columns + 2][merge_pieces];   // of the columns, of row_sum and of exact_sum
};

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
    if (max == -INFINITY || max - top < -200.0f) return 0.0f;   // 2^-200 or less; exp_f32 would overflow from -2^127 on
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

// `columns` columns of a row, from the element `first` of all rows on, and beside column 0 the row's figures. Called by the whole
// block, of which thread p of each run of segments has the same piece.
template <int columns>
__device__ inline void merge_piece(MergeShared &shared, const Segments &segments, const Merged &merged, int64_t first) {
    const int run = threadIdx.x / merge_pieces, piece = threadIdx.x % merge_pieces;
    const int64_t rows = segments.rows(), row = first / segments.dim_v, column = first % segments.dim_v;
    const int run_size = ceil_div(segments.splits, merge_runs), begin = min(run * run_size, segments.splits);
    const int end = row < rows ? min(begin + run_size, segments.splits) : begin;

    const int64_t at = begin * rows + row;
    float top = -INFINITY;
    const float *max_at = segments.row_max + at;
    for (int split = begin; split < end; split += merge_batch)
#pragma unroll
        for (int i = 0; i < merge_batch; ++i, max_at += rows)
            if (split + i < end) top = ptx::max_nan_f32(top, *max_at);
    shared.max[run][piece] = top;
    ptx::bar_sync();   // the maxima of all runs are there
#pragma unroll
    for (int other = 0; other < merge_runs; ++other) top = ptx::max_nan_f32(top, shared.max[other][piece]);

    // What is missing is read all the same, as something else, which spares a loop for each combination.
    const bool has_sums = segments.row_sum || segments.exact_sum;
    const float *sum_at = (segments.row_sum ? segments.row_sum : segments.row_max) + at;
    const float *exact_at = (segments.exact_sum ? segments.exact_sum : segments.row_sum ? segments.row_sum : segments.row_max) + at;
    const float *part_at = segments.partial + at * segments.width + column;
    const int64_t part_step = rows * segments.width;
    max_at = segments.row_max + at;
    struct alignas(columns * sizeof(float)) Part {
        float element[columns];
    };
    float values[columns] = {}, total = 0.0f, exact = 0.0f;
    for (int split = begin; split < end; split += merge_batch) {
        float max[merge_batch], sum[merge_batch], exactly[merge_batch];
        Part part[merge_batch];
#pragma unroll
        for (int i = 0; i < merge_batch; ++i, max_at += rows, sum_at += rows, exact_at += rows, part_at += part_step) {
            const bool there = split + i < end;
            max[i] = there ? *max_at : -INFINITY;
            sum[i] = there ? *sum_at : 0.0f;
            exactly[i] = there && column == 0 ? *exact_at : 0.0f;
            part[i] = there ? *reinterpret_cast<const Part *>(part_at) : Part{};
        }
#pragma unroll
        for (int i = 0; i < merge_batch; ++i) {
            const float weight = segment_weight(segments, max[i], top);
            if (weight == 0.0f) continue;   // what counts nothing may be anything
            total = fmaf(weight, segments.row_sum ? sum[i] : 1.0f, total);
            exact = fmaf(weight, has_sums ? exactly[i] : 1.0f, exact);
#pragma unroll
            for (int j = 0; j < columns; ++j) values[j] = fmaf(weight, part[i].element[j], values[j]);
        }
    }

#pragma unroll
    for (int i = 0; i < columns; ++i) shared.sum[run][i][piece] = values[i];
    shared.sum[run][columns][piece] = total;
    shared.sum[run][columns + 1][piece] = exact;
    ptx::bar_sync();   // the sums of all runs are there
    if (run != 0 || row >= rows) return;
#pragma unroll
    for (int other = 1; other < merge_runs; ++other) {
#pragma unroll
        for (int i = 0; i < columns; ++i) values[i] += shared.sum[other][i][piece];
        total += shared.sum[other][columns][piece];
        exact += shared.sum[other][columns + 1][piece];
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
    const float log2_total = ptx::lg2_approx_ftz_f32(exact), ln_2 = 0.693147182f;
    if (merged.lse) merged.lse[row] = segments.natural ? fmaf(log2_total, ln_2, top) : (top + log2_total) * ln_2;
    if (merged.max) merged.max[row] = top;
    if (merged.sum) merged.sum[row] = total;
}

// Merges the segments in their order: those of a run, then the runs. A block takes merge_tile elements of all rows.
__device__ inline void merge(MergeShared &shared, const Segments &segments, const Merged &merged) {
    const int64_t first = int64_t(blockIdx.x) * merge_tile + threadIdx.x % merge_pieces * merge_columns;
    if (segments.dim_v % merge_columns == 0 && segments.width % merge_columns == 0) {
        merge_piece<merge_columns>(shared, segments, merged, first);
        return;
    }
#pragma unroll 1
    for (int i = 0; i < merge_columns; ++i) merge_piece<1>(shared, segments, merged, first + i);   // a piece may lie across the end of a row
}

}  // namespace op
