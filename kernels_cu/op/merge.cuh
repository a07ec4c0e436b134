// Merges attention over several segments of the keys: each row is weighted by its sum of exponentials, in the tree of
// tree.cuh.
#pragma once

#include <cstdint>

#include "../kernel.cuh"
#include "../ptx/barrier.cuh"
#include "../ptx/math.cuh"
#include "../tile/format.cuh"
#include "cast.cuh"
#include "problem.cuh"
#include "tree.cuh"

namespace op {

constexpr int merge_columns = 4;   // of a thread: 16 bytes of a segment's row
constexpr int merge_pieces =
    64;   // pieces of merge_columns columns per block: few, so that few rows occupy many multiprocessors
constexpr int merge_runs = 4;     // of segments, each with threads and a node of its own
constexpr int merge_batch = 4;    // segments that a thread loads at once; their sum is a node, too
constexpr int merge_levels = 8;   // of the tree over a run's batches: enough for 4096 segments
constexpr int merge_threads = merge_pieces * merge_runs;
constexpr int merge_tile = merge_pieces * merge_columns;

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
};

struct MergeShared {
    float max[merge_runs][merge_pieces];
    float pending[merge_levels][merge_columns + 3][merge_threads];   // left nodes that wait for their right siblings

    template <int columns>
    __device__ void put(int level, const Piece<columns> &piece) {
        pending[level][0][threadIdx.x] = piece.max;
#pragma unroll
        for (int i = 0; i < columns + 2; ++i) pending[level][1 + i][threadIdx.x] = piece.value[i];
    }
    template <int columns>
    __device__ Piece<columns> get(int level, int thread) const {
        Piece<columns> piece{pending[level][0][thread], {}};
#pragma unroll
        for (int i = 0; i < columns + 2; ++i) piece.value[i] = pending[level][1 + i][thread];
        return piece;
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
    int splits;
    int64_t batch, heads, queries, heads_kv, width, dim_v;

    __device__ int64_t rows() const { return batch * heads * queries; }
};

// e^x for x <= 0, within 2^-21. The product with log2(e) has two parts: rounded to one, it would cost 2^-18 at -100.
__device__ inline float exp_f32(float x) {
    const float high = x * 1.44269502f, low = fmaf(x, 1.44269502f, -high) + x * 1.92596299e-8f;
    return ptx::ex2_approx_ftz_f32(high) * fmaf(low, 0.693147182f, 1.0f);
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

// The outputs, each of which may be null. If `sum` is one of them, the others are not divided by it.
struct Merged {
    Strided<__nv_bfloat16> out_bf16;   // [batch, heads, queries, dim_v], as the next two
    Strided<__half> out_f16;
    Strided<float> out_f32;
    float *lse, *max, *sum;   // [batch, heads, queries]
};

// Merges `columns` columns of a row, from element `first` of all rows on, and with column 0 the row's maximum and sums.
// Called by the whole block; thread p of each run has the same piece.
template <int columns>
__device__ inline void merge_piece(MergeShared &shared, const Segments &segments, const Merged &merged, int64_t first) {
    // The segments of this thread's run.
    const int run = threadIdx.x / merge_pieces, piece = threadIdx.x % merge_pieces;
    const int64_t rows = segments.rows(), row = first / segments.dim_v, column = first % segments.dim_v;
    int run_size = 1;   // a power of two
    while (run_size * merge_runs < segments.splits) run_size *= 2;
    const int begin = min(run * run_size, segments.splits);
    const int end = row < rows ? min(begin + run_size, segments.splits) : begin;

    // The largest logarithm of all segments, relative to which those in units of e are summed.
    const int64_t at = begin * rows + row;
    float top = -INFINITY;   // of all segments
    if (segments.natural) {
        const float *max_at = segments.row_max + at;
        for (int split = begin; split < end; ++split, max_at += rows) top = ptx::max_nan_f32(top, *max_at);
        shared.max[run][piece] = top;
        ptx::bar_sync();   // all threads see the maxima of all runs
#pragma unroll
        for (int other = 0; other < merge_runs; ++other) top = ptx::max_nan_f32(top, shared.max[other][piece]);
    }

    // Loads one segment, relative to an integer maximum.
    const bool has_sums = segments.row_sum || segments.exact_sum;
    struct alignas(columns * sizeof(float)) Part {
        float element[columns];
    };
    const auto segment = [&](int split) {
        if (split >= end) return Piece<columns>::none();
        const int64_t place = split * rows + row;
        const float max = segments.row_max[place];
        if (max == -INFINITY) return Piece<columns>::none();   // its values may be anything
        const Part part = *reinterpret_cast<const Part *>(segments.partial + place * segments.width + column);
        const float sum = segments.row_sum ? segments.row_sum[place] : 1.0f;
        const float exact = segments.exact_sum ? segments.exact_sum[place] : has_sums ? sum : 1.0f;
        Piece<columns> result{segments.natural ? 0.0f : ceilf(max), {}};
        // Below 2^-200 a segment adds nothing, and exp_f32 overflows at -2^127.
        const float weight = segments.natural    ? max - top < -200.0f ? 0.0f : exp_f32(max - top)
                             : max == result.max ? 1.0f
                                                 : ptx::ex2_approx_ftz_f32(max - result.max);
#pragma unroll
        for (int i = 0; i < columns; ++i) result.value[i] = part.element[i] * weight;
        result.value[columns] = sum * weight;
        result.value[columns + 1] = exact * weight;
        return result;
    };

    // The binary tree over the segments of this run, then over the runs of the block.
    Piece<columns> node = Piece<columns>::none();
    int batches = 0;
    for (int split = begin; split < end; split += merge_batch, ++batches) {
        Piece<columns> some[merge_batch];
#pragma unroll
        for (int i = 0; i < merge_batch; ++i) some[i] = segment(split + i);
        node = some[0].with(some[1]).with(some[2].with(some[3]));
        int level = 0;
        for (; batches >> level & 1; ++level) node = shared.get<columns>(level, threadIdx.x).with(node);
        if (split + merge_batch < end) shared.put(level, node);
    }
    if (batches) {   // the right edge, smallest nodes first; `node` holds the last batch and its level
        int level = 0;
        while (batches - 1 >> level & 1) ++level;
        for (++level; batches - 1 >> level; ++level)
            if (batches - 1 >> level & 1) node = shared.get<columns>(level, threadIdx.x).with(node);
    }
    ptx::bar_sync();   // all threads have read the pending nodes
    shared.put(0, node);
    ptx::bar_sync();   // all threads see the nodes of all runs
    if (run != 0 || row >= rows) return;
    const auto of_run = [&](int other) { return shared.get<columns>(0, other * merge_pieces + piece); };
    node = node.with(of_run(1)).with(of_run(2).with(of_run(3)));

    // Add the row's shift, and its sink.
    const int64_t query = row % segments.queries, head = row / segments.queries % segments.heads;
    const int64_t batch = row / segments.queries / segments.heads;
    float shift = 0.0f;   // of all scores, in units of log2
    if (segments.row_shift && node.value[columns] != 0.0f) shift = segments.row_shift[row] * log2_e;
    const float whole_shift = ceilf(shift), part_shift = shift - whole_shift;
    if (segments.sinks) {   // one more key, without a value
        const float sink = segments.sinks[head] * log2_e - shift, max = ptx::max_nan_f32(node.max, ceilf(sink));
        const float share = sink == -INFINITY ? 0.0f : ptx::ex2_approx_ftz_f32(sink - max);
        Piece<columns> of_sink{max, {}};
        of_sink.value[columns] = of_sink.value[columns + 1] = share;
        node = node.with(of_sink);
    }
    // Write the output, and with its first column the row's maximum and sums.
    const float total = node.value[columns], exact = node.value[columns + 1];
    float factor = merged.sum ? 1.0f : total == 0.0f ? 0.0f : 1.0f / total;
    if (segments.v_global) factor *= segments.v_global[head / (segments.heads / segments.heads_kv)];
    // Maxima are integers: the fraction of the shift scales the sums and outputs that are relative to them.
    const float part = merged.sum && part_shift != 0.0f ? ptx::ex2_approx_ftz_f32(part_shift) : 1.0f;
    float values[columns];
#pragma unroll
    for (int i = 0; i < columns; ++i) values[i] = node.value[i] * (factor * part);
    store_columns(merged.out_bf16, batch, head, query, column, values);
    store_columns(merged.out_f16, batch, head, query, column, values);
    store_columns(merged.out_f32, batch, head, query, column, values);
    if (column != 0) return;
    const float log2_total = ptx::lg2_approx_ftz_f32(exact);
    if (merged.lse) {
        const float max = segments.natural ? top : (node.max + log2_total + shift) * ln_2;
        merged.lse[row] = exact == 0.0f ? -INFINITY : segments.natural ? fmaf(log2_total, ln_2, max) : max;
    }
    if (merged.max) merged.max[row] = total == 0.0f ? -INFINITY : (segments.natural ? top : node.max) + whole_shift;
    if (merged.sum) merged.sum[row] = total * part;
}

// Merges the segments in their order. A block takes merge_tile elements of all rows.
__device__ inline void merge(MergeShared &shared, const Segments &segments, const Merged &merged) {
    const int64_t first = int64_t(blockIdx.x) * merge_tile + threadIdx.x % merge_pieces * merge_columns;
    if (segments.dim_v % merge_columns == 0 && segments.width % merge_columns == 0) {
        merge_piece<merge_columns>(shared, segments, merged, first);
        return;
    }
#pragma unroll 1
    for (int i = 0; i < merge_columns; ++i) {
        merge_piece<1>(shared, segments, merged, first + i);   // a piece may span two rows
        ptx::bar_sync();                                       // all threads have read the nodes
    }
}

}   // namespace op
