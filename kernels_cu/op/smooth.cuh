// Statistics from a first read of operands: means over the keys of a head and over blocks of queries, the largest
// magnitude, and the kernels that apply them.
#pragma once

#include <cstdint>

#include "../kernel.cuh"
#include "../ptx/barrier.cuh"
#include "../ptx/warp.cuh"
#include "../tile/format.cuh"
#include "../tile/rows.cuh"
#include "keys.cuh"
#include "problem.cuh"

namespace op {

constexpr int smooth_threads = 256;
constexpr int scan_run = 256;       // keys that a block reads
constexpr int scan_columns = 256;   // columns that fit its shared memory at a time

struct ScanShared {
    float of_team[smooth_threads * 8];
};

// The largest of the threads' values, which are at least 0, in thread 0.
__device__ inline float block_max(ScanShared &shared, float value) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) value = fmaxf(value, ptx::shfl_sync_bfly_f32(value, mask));
    if (threadIdx.x % 32 == 0) shared.of_team[threadIdx.x / 32] = value;
    ptx::bar_sync();   // every warp's maximum is there
#pragma unroll
    for (int warp = 0; warp < smooth_threads / 32; ++warp) value = fmaxf(value, shared.of_team[warp]);
    return value;
}

// sums[runs, batch, heads, cols] = the sums over runs of `scan_run` keys, if with_sums. largest[runs, batch, heads] =
// their largest finite magnitudes, or null. A block has one run; the grid is runs x heads x batch. A team of threads
// reads a row, neighboring teams read neighboring rows. The order of every sum depends on the shape alone.
template <bool with_sums, class Element>
__device__ inline void scan_keys(ScanShared &shared, const KeyArray<Element> &x, float *sums, float *largest) {
    // The keys of the run.
    constexpr int unroll = 16 / sizeof(Element);   // rows in flight
    const int cols = x.cols;
    const int run_of_head = gridDim.x - 1 - blockIdx.x;
    const tile::Rows<Element> rows = x.rows(x.unit(run_of_head, scan_run));
    const size_t run = size_t(run_of_head) * x.batch * x.heads + x.head();

    // A team's sums over its rows, and the largest magnitude of each thread.
    tile::FiniteMax<Element> magnitude;
    for (int first_column = 0; first_column < cols; first_column += scan_columns) {
        const int team = min(ceil_div(cols - first_column, 8), scan_columns / 8), teams = smooth_threads / team;
        const int column = first_column + threadIdx.x % team * 8, first = threadIdx.x / team;
        float of_columns[8] = {};
        for (int row = first; row < scan_run && first < teams; row += unroll * teams) {
            tile::Eight<Element> loaded[unroll];
            rows.load(loaded, row, teams, column);
#pragma unroll
            for (const tile::Eight<Element> &eight : loaded) {
#pragma unroll
                for (const uint4 &chunk : eight.chunk) magnitude.take(chunk);
                if constexpr (with_sums) {
                    float values[8];
                    eight.unpack(values);
#pragma unroll
                    for (int i = 0; i < 8; ++i) of_columns[i] += values[i];
                }
            }
        }
        // The sums over all teams.
        if constexpr (with_sums) {
            if (first_column > 0) ptx::bar_sync();   // the sums of the columns before are read
#pragma unroll
            for (int i = 0; i < 8; i += 4)
                *reinterpret_cast<float4 *>(&shared.of_team[threadIdx.x * 8 + i]) = {
                    of_columns[i], of_columns[i + 1], of_columns[i + 2], of_columns[i + 3]};
            ptx::bar_sync();   // the sums of all teams are there
            const int mine = threadIdx.x;
            if (mine < team * 8 && first_column + mine < cols) {
                float sum = 0.0f;
                for (int i = 0; i < teams; ++i) sum += shared.of_team[i * team * 8 + mine];
                sums[run * cols + first_column + mine] = sum;
            }
        }
    }

    // The largest magnitude of the block.
    if (!largest) return;
    if constexpr (with_sums) ptx::bar_sync();   // the sums are read
    const float of_block = block_max(shared, magnitude.value());
    if (threadIdx.x == 0) largest[run] = of_block;
}

// The same with sums or largest null. Blocks start with the last keys.
template <class Element>
__device__ inline void scan_keys(ScanShared &shared, KeyArray<Element> x, float *sums, float *largest) {
    x.backwards = true;
    if (sums) scan_keys<true>(shared, x, sums, largest);
    else scan_keys<false>(shared, x, sums, largest);
}

// global_scale[0] = the smallest power of two over 6 with which `factor` times the largest of largest[count] fits
// NVFP4, so is at most 448 x 6; 1 if all are 0. Another power of two changes no code, so operands quantized as a batch
// equal those quantized one by one. A block of equal powers of two is exact, since its code is 6.
__device__ inline void operand_scale(ScanShared &shared, const float *largest, float *global_scale, float factor,
                                     int count) {
    float magnitude = 0.0f;
    for (int i = threadIdx.x; i < count; i += smooth_threads) magnitude = fmaxf(magnitude, largest[i]);
    magnitude = block_max(shared, magnitude);
    if (threadIdx.x > 0) return;
    const uint32_t bits = __float_as_uint(__fdiv_rn(magnitude, 448.0f) * factor);
    const uint32_t exponent =
        max((bits >> 23) + ((bits & 0x7fffffu) != 0), 4u);   // so that a sixth of it is not subnormal
    global_scale[0] = magnitude == 0.0f ? 1.0f : __uint_as_float(exponent << 23) * (1.0f / 6.0f);
}

constexpr int mean_columns = 32;   // of a block, whose warps share the runs

struct MeanShared {
    float of_warp[smooth_threads / 32][mean_columns];
};
static_assert(sizeof(MeanShared) <= sizeof(ScanShared), "whose memory it may take");

// mean[sequences, columns] = the sum of sums[runs, batch, columns] over the runs of a sequence, divided by the number
// of its keys; 0 without keys. The grid is columns x sequences.
__device__ inline void mean_keys(MeanShared &shared, const float *sums, const int *key_starts, const int *key_ends,
                                 float *mean, int keys, int runs, int batch, int columns) {
    // The runs and the number of keys of the sequence.
    constexpr int warps = smooth_threads / 32;
    const int warp = threadIdx.x / mean_columns, lane = threadIdx.x % mean_columns,
              column = blockIdx.x * mean_columns + lane;
    const int sequence = blockIdx.y;
    int count = key_ends ? min(key_ends[sequence], keys) : keys;
    const float *its_sums = sums + size_t(sequence) * columns;
    if (key_starts) {
        const int start = key_starts[sequence], first = first_unit(start, sequence, scan_run);
        count = max(count - start, 0);
        its_sums = sums + size_t(first) * batch * columns;
        runs = min(ceil_div(count, scan_run), runs - first);
    }

    // The sums of warps over their runs, then of the block.
    float sum = 0.0f;
    if (column < columns) {
#pragma unroll 8
        for (int run = warp; run < runs; run += warps) sum += __ldg(its_sums + size_t(run) * batch * columns + column);
    }
    shared.of_warp[warp][lane] = sum;
    ptx::bar_sync();   // the sums of all warps are there
    if (warp > 0 || column >= columns) return;
    for (int i = 1; i < warps; ++i) sum += shared.of_warp[i][lane];
    mean[size_t(sequence) * columns + column] = count > 0 ? __fdiv_rn(sum, float(count)) : 0.0f;
}

// operand_scale() at the end of another kernel, by one of its blocks, unless global_scale is null. If `largest` is
// null, there are no magnitudes.
__device__ inline void operand_scale_too(ScanShared &shared, const float *largest, float *global_scale, float factor,
                                         int count) {
    if (!global_scale || blockIdx.x > 0 || blockIdx.y > 0) return;
    ptx::bar_sync();   // all threads have read shared memory
    operand_scale(shared, largest, global_scale, factor, largest ? count : 0);
}

// mean[batch, heads, blocks, cols] = the means of blocks of queries, 0 for empty blocks; y[batch, heads, queries, cols]
// = x minus its block's mean. A block of threads has one block of queries; the grid is blocks x heads x batch. The
// order of sums depends on the shape alone.
template <class Element>
__device__ inline void less_block_means(ScanShared &shared, const KeyArray<Element> &x, float *mean, float *y) {
    // The queries of the block.
    constexpr int unroll = 4;
    const int cols = x.cols;
    const KeyUnit unit = x.unit(blockIdx.x, smooth_queries);
    const tile::Rows<Element> rows = x.rows(unit);
    float *means = mean + (x.head() * gridDim.x + blockIdx.x) * cols,
          *target = y + (x.head() * x.keys + unit.first) * cols;
    for (int first_column = 0; first_column < cols; first_column += scan_columns) {
        const int team = min(ceil_div(cols - first_column, 8), scan_columns / 8), teams = smooth_threads / team;
        const int column = first_column + threadIdx.x % team * 8, first = threadIdx.x / team;
        const int last = first < teams ? rows.rows : 0;   // threads of no team have no rows
        auto for_eights = [&](auto &&body) {
            for (int row = first; row < last; row += unroll * teams) {
                tile::Eight<Element> loaded[unroll];
                rows.load(loaded, row, teams, column);
#pragma unroll
                for (int i = 0; i < unroll; ++i) {
                    float values[8];
                    loaded[i].unpack(values);
                    body(row + i * teams, values);
                }
            }
        };
        // The sums of teams over their rows.
        float sums[8] = {};
        for_eights([&](int, float (&values)[8]) {
#pragma unroll
            for (int i = 0; i < 8; ++i) sums[i] += values[i];
        });
        // The mean over all teams.
        if (first_column > 0) ptx::bar_sync();   // the means of the columns before are read
#pragma unroll
        for (int i = 0; i < 8; ++i) shared.of_team[threadIdx.x * 8 + i] = sums[i];
        ptx::bar_sync();   // the sums of all teams are there
        const int mine = threadIdx.x;
        float sum = 0.0f;
        for (int i = 0; i < teams && mine < team * 8; ++i) sum += shared.of_team[i * team * 8 + mine];
        sum = __fdiv_rn(sum, float(max(rows.rows, 1)));
        ptx::bar_sync();   // all sums are read
        shared.of_team[mine] = sum;
        if (mine < team * 8 && first_column + mine < cols) means[first_column + mine] = sum;
        ptx::bar_sync();   // the means are there

        // The rows minus the mean.
        for_eights([&](int row, float (&values)[8]) {
            if (row >= rows.rows) return;
            float *first = target + size_t(row) * cols + column;
#pragma unroll
            for (int i = 0; i < 8; ++i) values[i] -= shared.of_team[column - first_column + i];
            if (cols % 8 == 0) {
#pragma unroll
                for (int i = 0; i < 8; i += 4)
                    *reinterpret_cast<float4 *>(first + i) = {values[i], values[i + 1], values[i + 2], values[i + 3]};
            } else {
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    if (column + i < cols) first[i] = values[i];
            }
        });
    }
}

// y[batch, heads, rows, cols] = x + mean, for the first `cols` columns of the strided x[batch, heads, rows, width].
// `run` rows share one mean[sequences, heads, blocks, cols] or, if `units`, one mean[batch, heads, blocks, cols] of
// units of packed sequences. The grid is rows x heads x batch.
__device__ inline void add_mean(const KeyArray<float> &x, const float *mean, float *y, int run, bool units, int blocks,
                                int cols) {
    const int row = blockIdx.x, sequence = x.key_starts ? sequence_of(x.key_starts, x.sequences, row) : blockIdx.z;
    const int start = x.key_starts ? __ldg(x.key_starts + sequence) : 0;
    const int block = (units ? first_unit(start, sequence, run) : 0) + (row - start) / run;
    const float *source = x.rows({sequence, row, 1}).at(0, 0);
    const float *added = mean + (x.head(units ? blockIdx.z : sequence) * blocks + block) * cols;
    float *target = y + (x.head() * x.keys + row) * cols;
    for (int column = threadIdx.x; column < cols; column += blockDim.x) target[column] = source[column] + added[column];
}

constexpr int dot_team = 8;                           // lanes that share a row
constexpr int dot_rows = smooth_threads / dot_team;   // of a block

// Rows of queries q[batch, heads_kv, group, queries, cols] with strides in elements.
template <class Element>
struct QueryRows {
    const Element *q;                    // [batch, heads_kv, group, queries, cols]
    int64_t batch, head, group, query;   // strides
    int heads_kv, groups, queries, cols;
    const int *query_starts;   // [sequences] or null: batch i is sequence i
    int sequences;
};

// out[row] = scale times the sum of q[row, cols] y[sequence, head, cols]. The grid is queries x heads_kv x batch;
// arrays without strides are in row-major order.
template <class Element>
__device__ inline void row_dot(const QueryRows<Element> &x, const float *y, float *out, float scale) {
    // The query of this team, and the vector of its sequence and head.
    const int query = blockIdx.x * dot_rows + threadIdx.x / dot_team;
    const int here = min(query, x.queries - 1);   // lanes past the end take part in the exchange
    const int sequence = x.query_starts ? sequence_of(x.query_starts, x.sequences, here) : blockIdx.z;
    const size_t head = size_t(blockIdx.z) * x.heads_kv + blockIdx.y;
    const Element *q = x.q + blockIdx.z * x.batch + blockIdx.y * x.head + here * x.query;
    const tile::Rows<float> of_y(y + (size_t(sequence) * x.heads_kv + blockIdx.y) * x.cols, 0, 1, x.cols);

    // The product of each head of the group, by eights of columns and then over the team.
#pragma unroll 1
    for (int group = 0; group < x.groups; ++group, q += x.group) {
        const tile::Rows<Element> of_q(q, 0, 1, x.cols);
        float sum = 0.0f;
        for (int column = threadIdx.x % dot_team * 8; column < x.cols; column += dot_team * 8) {
            tile::Eight<Element> q_eight[1];
            tile::Eight<float> y_eight[1];
            of_q.load(q_eight, 0, 0, column);
            of_y.load(y_eight, 0, 0, column);
            float q_values[8], y_values[8];
            q_eight[0].unpack(q_values);
            y_eight[0].unpack(y_values);
#pragma unroll
            for (int i = 0; i < 8; ++i) sum = fmaf(q_values[i], y_values[i], sum);
        }
#pragma unroll
        for (int mask = 1; mask < dot_team; mask *= 2) sum += ptx::shfl_sync_bfly_f32(sum, mask);
        if (query < x.queries && threadIdx.x % dot_team == 0)
            out[(head * x.groups + group) * x.queries + query] = sum * scale;
    }
}

}   // namespace op
