// The moments of rows that a block of threads divides among its lanes.
#pragma once

#include <cstdint>

#include "../kernel.cuh"
#include "../ptx/barrier.cuh"
#include "../ptx/warp.cuh"

namespace op {

constexpr int norm_threads = 256, norm_columns = 16;   // threads of a block; values of a lane

// The most shares that a lane has of rows of up to 8192 values. Longer rows take more lanes, then more shares.
constexpr int norm_shares = 2;

struct NormShared {
    float2 of_warp[2][norm_threads / 32];   // used alternately, so that one barrier is enough
};

// How the threads of a block divide rows of `cols` values, which depends on `cols` alone. A row has `lanes` threads, a
// power of two, enough to hold it in registers where possible.
struct NormLanes {
    int power, lanes, shares;   // lanes = 2^power; shares of a lane

    __device__ explicit NormLanes(int cols) {
        const int there = ceil_div(cols, norm_columns), enough = ceil_div(there, norm_shares);
        power = min(max(32 - __clz(enough - 1), 1), 31 - __clz(norm_threads));
        lanes = 1 << power;
        shares = (there + lanes - 1) >> power;
    }
    __device__ int rows() const { return norm_threads >> power; }   // of a block at a time
    __device__ int row() const { return threadIdx.x >> power; }
    __device__ int lane() const { return threadIdx.x & (lanes - 1); }
    __device__ int column(int share) const { return (lane() + share * lanes) * norm_columns; }
};

// Adds sums over the lanes of a row, in a tree over neighbors, and returns the totals to each lane. Called by the whole
// block. Only x is added unless `both`. turn alternates between 0 and 1 from call to call. threads: how many
// neighboring threads hold the same sums.
template <bool both, int threads = 1>
__device__ inline float2 row_sums(NormShared &shared, int &turn, int lanes, float2 sums) {
    lanes *= threads;
    const auto pair_up = [&sums](int mask) {
        sums.x += ptx::shfl_sync_bfly_f32(sums.x, mask);
        if (both) sums.y += ptx::shfl_sync_bfly_f32(sums.y, mask);
    };
    if (lanes < 32) {
#pragma unroll
        for (int mask = threads; mask < 16; mask *= 2)
            if (mask < lanes) pair_up(mask);
        return sums;
    }
#pragma unroll
    for (int mask = threads; mask < 32; mask *= 2) pair_up(mask);
    if (lanes == 32) return sums;
    const int warp = threadIdx.x / 32, warps = lanes / 32;
    if (threadIdx.x % 32 == 0) shared.of_warp[turn][warp] = sums;
    ptx::bar_sync();   // all threads see the sums of every warp and have read those of two calls ago
    sums = shared.of_warp[turn][(warp & -warps) + (threadIdx.x & (warps - 1))];
    turn ^= 1;
#pragma unroll
    for (int mask = 1; mask < norm_threads / 32; mask *= 2)
        if (mask < warps) pair_up(mask);
    return sums;
}

// What the output of a row takes from the row: its mean in two parts, of which `rest` is the rounding error, and
// norm_factor(s, eps).
struct RowMoments {
    float mean, rest, factor;
};

__device__ inline float norm_factor(float squares, float eps) { return 1.0f / sqrtf(squares + eps); }

// The moments of a row, whose order depends on `cols` alone. each_share(add) calls add(column, values) for the shares
// of a lane. Called by the whole block. whole: every share of the row is full. threads: those that share a lane's
// values.
template <bool whole, int threads = 1, class EachShare>
__device__ inline RowMoments row_moments(NormShared &shared, int &turn, const NormLanes &place, int cols, bool centered,
                                         float eps, EachShare &&each_share) {
    const float count = cols;
    RowMoments row = {0.0f, 0.0f};
    float squares;
    float2 sum = {};
    if (centered) {
        each_share([&](int, const float (&some)[2][8]) {
#pragma unroll
            for (int i = 0; i < 8; ++i) sum.x += some[0][i], sum.y += some[1][i];
        });
        row.mean = row_sums<false, threads>(shared, turn, place.lanes, {sum.x + sum.y, 0.0f}).x / count;
        sum = {};
        each_share([&](int column, const float (&some)[2][8]) {
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                const float off = whole || column + i < cols ? some[i / 8][i % 8] - row.mean : 0.0f;
                sum.x += off;
                sum.y = fmaf(off, off, sum.y);
            }
        });
        sum = row_sums<true, threads>(shared, turn, place.lanes, sum);
        row.rest = sum.x / count;
        squares = sum.y / count - row.rest * row.rest;
    } else {
        each_share([&](int, const float (&some)[2][8]) {
#pragma unroll
            for (int i = 0; i < 8; ++i)
                sum.x = fmaf(some[0][i], some[0][i], sum.x), sum.y = fmaf(some[1][i], some[1][i], sum.y);
        });
        squares = row_sums<false, threads>(shared, turn, place.lanes, {sum.x + sum.y, 0.0f}).x / count;
    }
    row.factor = norm_factor(squares, eps);
    return row;
}

}   // namespace op
