// Smoothing of keys: their mean over all keys of a head, in two steps, and what it takes from every score of a query.
#pragma once

#include <cstdint>

#include "../kernel.cuh"
#include "../ptx/barrier.cuh"
#include "../ptx/warp.cuh"
#include "../tile/packing.cuh"
#include "keys.cuh"

namespace op {

constexpr int smooth_threads = 256;
constexpr int sum_run = 256;          // keys that a block sums
constexpr int sum_columns = 256;      // that it has room for at a time

struct SumShared {
    float of_team[smooth_threads * 8];
};

// partial[runs, batch, heads, cols] = the sums over runs of keys, one to a block; the grid is runs x heads x batch. A team of
// threads takes a row, neighbouring teams take neighbouring rows; every sum is in an order that depends on the shape alone.
template <class Element>
__device__ inline void sum_keys(SumShared &shared, const KeyArray<Element> &x, float *partial) {
    constexpr int unroll = 4;
    const int cols = x.cols;
    const tile::Rows<Element> rows = x.rows(blockIdx.x * sum_run, sum_run);
    float *const target = partial + ((size_t(blockIdx.x) * x.batch + blockIdx.z) * x.heads + blockIdx.y) * cols;
    for (int first_column = 0; first_column < cols; first_column += sum_columns) {
        const int team = min(ceil_div(cols - first_column, 8), sum_columns / 8), teams = smooth_threads / team;
        const int column = first_column + threadIdx.x % team * 8, first = threadIdx.x / team;
        float sums[8] = {};
        for (int row = first; row < sum_run && first < teams; row += unroll * teams) {
            tile::Eight<Element> loaded[unroll];
            rows.load(loaded, row, teams, column);
#pragma unroll
            for (const tile::Eight<Element> &eight : loaded) {
                float values[8];
                eight.unpack(values);
#pragma unroll
                for (int i = 0; i < 8; ++i) sums[i] += values[i];
            }
        }
        if (first_column > 0) ptx::bar_sync();   // the sums of the columns before are read
#pragma unroll
        for (int i = 0; i < 8; i += 4)
            *reinterpret_cast<float4 *>(&shared.of_team[threadIdx.x * 8 + i]) = {sums[i], sums[i + 1], sums[i + 2], sums[i + 3]};
        ptx::bar_sync();   // the sums of all teams are there
        const int mine = threadIdx.x;
        if (mine < team * 8 && first_column + mine < cols) {
            float sum = 0.0f;
            for (int i = 0; i < teams; ++i) sum += shared.of_team[i * team * 8 + mine];
            target[first_column + mine] = sum;
        }
    }
}

constexpr int mean_columns = 32;   // of a block, whose warps share the runs

struct MeanShared {
    float of_warp[smooth_threads / 32][mean_columns];
};

// mean[batch, columns] = the sum of partial[runs, batch, columns] over the runs, over the number of keys; 0 where there are
// none. The grid is columns x batch.
__device__ inline void mean_keys(MeanShared &shared, const float *partial, const int *key_ends, float *mean, int keys, int runs,
                                 int batch, int columns) {
    constexpr int warps = smooth_threads / 32;
    const int warp = threadIdx.x / mean_columns, lane = threadIdx.x % mean_columns, column = blockIdx.x * mean_columns + lane;
    float sum = 0.0f;
    if (column < columns) {
#pragma unroll 8
        for (int run = warp; run < runs; run += warps) sum += __ldg(partial + (size_t(run) * batch + blockIdx.y) * columns + column);
    }
    shared.of_warp[warp][lane] = sum;
    ptx::bar_sync();   // the sums of all warps are there
    if (warp > 0 || column >= columns) return;
    for (int i = 1; i < warps; ++i) sum += shared.of_warp[i][lane];
    const int count = key_ends ? min(key_ends[blockIdx.y], keys) : keys;
    mean[size_t(blockIdx.y) * columns + column] = count > 0 ? __fdiv_rn(sum, float(count)) : 0.0f;
}

constexpr int dot_team = 8;                              // lanes that share a row
constexpr int dot_rows = smooth_threads / dot_team;      // of a block

// Rows of queries q[batch, heads_kv, group, queries, cols] with strides in elements.
template <class Element>
struct QueryRows {
    const Element *q;
    int64_t batch, head, group, query;   // strides
    int heads_kv, groups, queries, cols;
};

// out[row] = scale times the sum of q[row, cols] y[batch, head, cols], plus add[row] where that is given; -inf stays. The grid
// is rows x heads_kv x batch; arrays without strides are in row-major order.
template <class Element>
__device__ inline void row_dot(const QueryRows<Element> &x, const float *y, const float *add, float *out, float scale) {
    const int row = blockIdx.x * dot_rows + threadIdx.x / dot_team, count = x.groups * x.queries;
    const int here = min(row, count - 1);   // lanes past the end stay for the exchange
    const size_t head = size_t(blockIdx.z) * x.heads_kv + blockIdx.y;
    const tile::Rows<Element> of_q(x.q + blockIdx.z * x.batch + blockIdx.y * x.head + here / x.queries * x.group + here % x.queries * x.query, 0, 1, x.cols);
    const tile::Rows<float> of_y(y + head * x.cols, 0, 1, x.cols);
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
    if (row >= count || threadIdx.x % dot_team != 0) return;
    const float before = add ? add[head * count + row] : 0.0f;
    out[head * count + row] = before == -INFINITY ? before : before + sum * scale;
}

}  // namespace op
