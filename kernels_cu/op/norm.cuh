// Rows divided by their root mean square, or by their standard deviation about their mean.
#pragma once

#include <cstdint>

#include "../ptx/barrier.cuh"
#include "../ptx/warp.cuh"
#include "produce.cuh"

namespace op {

// Shares of a row that a lane holds in registers: rows of up to 8192 values. What longer rows have beyond is read again
// in every pass.
constexpr int norm_shares = 2;

struct NormShared {
    float2 of_warp[produce_threads / 32];
};

// How the threads of a block have rows of `cols` values, which follows from `cols` alone: `lanes` threads to a row, a
// power of two, so that they hold the row in registers where they can.
struct NormLanes {
    int power, lanes, shares;   // of two, which `lanes` is; of a lane

    __device__ explicit NormLanes(int cols) : power(1) {
        const int there = ceil_div(cols, produce_share);
        while (norm_shares << power < there && 1 << power < produce_threads) ++power;
        lanes = 1 << power;
        shares = (there + lanes - 1) >> power;
    }
    __device__ int rows() const { return produce_threads >> power; }   // of a block at a time
    __device__ int row() const { return threadIdx.x >> power; }
    __device__ int lane() const { return threadIdx.x & (lanes - 1); }
    __device__ int column(int share) const { return (lane() + share * lanes) * produce_share; }
};

// The sums of a row's lanes, in each of them: pairs of neighbours, pairs of those, and so on. By the whole block.
__device__ inline float2 row_sums(NormShared &shared, int lanes, float2 sums) {
    const auto pair_up = [&sums](int mask) {
        sums.x += ptx::shfl_sync_bfly_f32(sums.x, mask);
        sums.y += ptx::shfl_sync_bfly_f32(sums.y, mask);
    };
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2)
        if (mask < lanes) pair_up(mask);
    if (lanes <= 32) return sums;
    const int warp = threadIdx.x / 32, warps = lanes / 32;
    ptx::bar_sync();   // nobody reads the sums of another pass any more
    if (threadIdx.x % 32 == 0) shared.of_warp[warp] = sums;
    ptx::bar_sync();   // those of every warp are there
    sums = shared.of_warp[(warp & -warps) + (threadIdx.x & (warps - 1))];
#pragma unroll
    for (int mask = 1; mask < produce_threads / 32; mask *= 2)
        if (mask < warps) pair_up(mask);
    return sums;
}

// What is normed: x, or the sum of it and `residual`, which goes to `total`.
template <class Element>
struct NormInput {
    const Element *x, *residual;
    Element *total;
    int64_t x_stride, residual_stride, total_stride;

    // Begins to load x.
    template <int count>
    __device__ void begin(int64_t row, bool present, int column, int step, int cols,
                          RowShares<Element, count> &shares) const {
        shares.load(x + row * x_stride, present, column, step, cols);
    }

    // The values, of x as it was loaded.
    template <int count>
    __device__ void finish(int64_t row, bool present, int column, int step, int cols, bool rounds,
                           RowShares<Element, count> &shares, float (&values)[count][2][8]) const {
#pragma unroll
        for (int i = 0; i < count; ++i) shares.unpack(i, values[i]);
        if (!residual) return;
        shares.load(residual + row * residual_stride, present, column, step, cols);
#pragma unroll
        for (int i = 0; i < count; ++i) {
            float other[2][8];
            shares.unpack(i, other);
#pragma unroll
            for (int j = 0; j < 16; ++j) {
                float &value = values[i][j / 8][j % 8];
                value += other[j / 8][j % 8];
                if (rounds) value = rounded<Element>(value);
            }
        }
    }
};

// weight[cols] and bias[cols] may be missing: 1 and 0. rounds: to x's type, the sum with the residual and what the
// weight multiplies.
struct NormOptions {
    FloatRows weight, bias;
    float eps, offset;
    bool centered, rounds;
};

// y[rows, cols] = (v - m) / sqrt(s + eps) (weight + offset) + bias, where v is x or the sum of it and the residual, m
// its mean where `centered`, else 0, and s the mean square of v - m. A row's sums are added in an order that follows
// from `cols` alone. By whole blocks of `produce_threads`.
template <class Element>
__device__ inline void norm_rows(NormShared &shared, const NormInput<Element> &input, const NormOptions &options,
                                 const Produced &y) {
    const NormLanes place(y.cols);
    const int cols = y.cols, step = place.lanes * produce_share;
    const float count = cols;
    const int64_t end = y.end(), blocks_rows = int64_t(gridDim.x) * place.rows();
    constexpr bool ahead = sizeof(Element) == 2;   // the next rows are on their way while these are worked on
    RowShares<Element, norm_shares> next;
    const auto begin = [&](int64_t row) { input.begin(row, row < y.rows, place.column(0), step, cols, next); };
    if (ahead) begin(int64_t(blockIdx.x) * place.rows() + place.row());
#pragma unroll 1
    for (int64_t first = int64_t(blockIdx.x) * place.rows(); first < end; first += blocks_rows) {
        const int64_t row = first + place.row();
        const bool present = row < y.rows;
        float values[norm_shares][2][8];
        if (!ahead) begin(row);
        input.finish(row, present, place.column(0), step, cols, options.rounds, next, values);
        if (ahead) begin(row + blocks_rows);
        const auto load_again = [&](int share, float (&some)[2][8]) {
            RowShares<Element, 1> shares;
            float one[1][2][8];
            input.begin(row, present, place.column(share), 0, cols, shares);
            input.finish(row, present, place.column(share), 0, cols, options.rounds, shares, one);
#pragma unroll
            for (int i = 0; i < 16; ++i) some[i / 8][i % 8] = one[0][i / 8][i % 8];
        };
        // The sums of add(value) over the row, in two parts of each lane.
        const auto sum = [&](auto &&add) {
#pragma unroll
            for (int i = 0; i < norm_shares; ++i) add(place.column(i), values[i]);
#pragma unroll 1
            for (int i = norm_shares; i < place.shares; ++i) {
                float some[2][8];
                load_again(i, some);
                add(place.column(i), some);
            }
        };
        float mean = 0.0f, rest = 0.0f, squares;   // the mean in two parts: the second is what rounding took from it
        if (options.centered) {
            float2 sums = {};
            sum([&](int, const float (&some)[2][8]) {
#pragma unroll
                for (int i = 0; i < 8; ++i) sums.x += some[0][i], sums.y += some[1][i];
            });
            mean = row_sums(shared, place.lanes, {sums.x + sums.y, 0.0f}).x / count;
            sums = {};
            sum([&](int column, const float (&some)[2][8]) {
#pragma unroll
                for (int i = 0; i < 16; ++i) {
                    const float off = column + i < cols ? some[i / 8][i % 8] - mean : 0.0f;
                    sums.x += off;
                    sums.y = fmaf(off, off, sums.y);
                }
            });
            sums = row_sums(shared, place.lanes, sums);
            rest = sums.x / count;
            squares = sums.y / count - rest * rest;
        } else {
            float2 sums = {};
            sum([&](int, const float (&some)[2][8]) {
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    sums.x = fmaf(some[0][i], some[0][i], sums.x), sums.y = fmaf(some[1][i], some[1][i], sums.y);
            });
            squares = row_sums(shared, place.lanes, {sums.x + sums.y, 0.0f}).x / count;
        }
        const float factor = 1.0f / sqrtf(squares + options.eps);
#pragma unroll 1
        for (int share = 0; share < place.shares; ++share) {
            float (&some)[2][8] = values[0];
            const int column = place.column(share);
            if (share >= norm_shares) load_again(share, some);
            if (present && input.total && column < cols)
                store_share(input.total + row * input.total_stride + column, cols - column, some);
            const auto each = [&some](auto &&change) {
#pragma unroll
                for (int i = 0; i < 16; ++i) change(some[i / 8][i % 8], i);
            };
            if (options.centered) each([&](float &value, int) { value = (value - mean - rest) * factor; });
            else each([&](float &value, int) { value *= factor; });
            if (options.rounds) each([](float &value, int) { value = rounded<Element>(value); });
#pragma unroll 1
            for (int what = 0; what < 2; ++what) {
                const FloatRows &weight = options.weight, &bias = options.bias;
                const FloatRows of_columns = {what ? bias.bf16 : weight.bf16, what ? bias.f16 : weight.f16,
                                              what ? bias.f32 : weight.f32, 0};
                if (!of_columns.there() || column >= cols) continue;
                float more[2][8];
                load_share(of_columns, 0, column, cols, more);
                if (what) each([&](float &value, int i) { value += more[i / 8][i % 8]; });
                else each([&](float &value, int i) { value *= more[i / 8][i % 8] + options.offset; });
            }
            y.store(row, column, some);
#pragma unroll
            for (int i = 0; i < 16; ++i) some[i / 8][i % 8] = values[1][i / 8][i % 8];
        }
        if (row >= y.rows && row < end) y.clear(row, place.lane(), place.lanes);
    }
}

}   // namespace op
