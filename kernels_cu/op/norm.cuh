// Rows divided by their root mean square, or by their standard deviation about their mean.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../ptx/barrier.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/warp.cuh"
#include "produce.cuh"

namespace op {

// The most shares that a lane has of rows of up to 8192 values. Longer rows take more lanes, then more shares.
constexpr int norm_shares = 2;

struct NormShared {
    float2 of_warp[2][produce_threads / 32];   // used alternately, so that one barrier is enough
};

// How the threads of a block divide rows of `cols` values, which depends on `cols` alone. A row has `lanes` threads, a
// power of two, enough to hold it in registers where possible.
struct NormLanes {
    int power, lanes, shares;   // lanes = 2^power; shares of a lane

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

// The sums over a row's lanes, in each lane: pairs of neighbors, pairs of pairs, and so on. Called by the whole block.
// both: sums of two numbers, not only the first. turn: 0 and 1 alternately.
template <bool both>
__device__ inline float2 row_sums(NormShared &shared, int &turn, int lanes, float2 sums) {
    const auto pair_up = [&sums](int mask) {
        sums.x += ptx::shfl_sync_bfly_f32(sums.x, mask);
        if (both) sums.y += ptx::shfl_sync_bfly_f32(sums.y, mask);
    };
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2)
        if (mask < lanes) pair_up(mask);
    if (lanes <= 32) return sums;
    const int warp = threadIdx.x / 32, warps = lanes / 32;
    if (threadIdx.x % 32 == 0) shared.of_warp[turn][warp] = sums;
    ptx::bar_sync();   // all threads see the sums of every warp and have read those of two calls ago
    sums = shared.of_warp[turn][(warp & -warps) + (threadIdx.x & (warps - 1))];
    turn ^= 1;
#pragma unroll
    for (int mask = 1; mask < produce_threads / 32; mask *= 2)
        if (mask < warps) pair_up(mask);
    return sums;
}

// The input: x, or x + residual, which is written to `total`.
template <class Element>
struct NormInput {
    const Element *x, *residual;   // [rows, cols]; residual may be null
    Element *total;                // [rows, cols] or null
    int64_t x_stride, residual_stride, total_stride;

    __device__ bool is_whole(int cols) const {
        return is_whole_rows(x, x_stride, cols) && (!residual || is_whole_rows(residual, residual_stride, cols)) &&
               (!total || is_whole_rows(total, total_stride, cols));
    }
};

// Missing weight[cols] and bias[cols] are 1 and 0. rounds: the sum with the residual and the factor of the weight are
// rounded to x's type.
struct NormOptions {
    FloatRows weight, bias;
    float eps, offset;
    bool centered, rounds;
};

// Shared memory in which each thread keeps 128 bytes of rows for itself. Chunks of 16 bytes have a stride of a block of
// threads, so that banks do not conflict.
struct KeptRows {
    static constexpr int chunks = 8;
    uint4 chunk[chunks][produce_threads];

    // How many shares fit, and the first chunk of one.
    template <class Kept>
    static constexpr int shares = chunks / sizeof(Kept);
    template <class Kept>
    __device__ uint4 &of(int share) {
        return chunk[share * sizeof(Kept)][threadIdx.x];
    }

    // Starts copying a lane's share, through the L1: the next instruction finds the other half of each sector there.
    template <class Kept>
    __device__ void begin(int share, const Kept *source) {
        const uint32_t target = static_cast<uint32_t>(__cvta_generic_to_shared(&of<Kept>(share)));
        const char *from = reinterpret_cast<const char *>(source);
#pragma unroll
        for (int i = 0; i < int(sizeof(Kept)); ++i)
            ptx::cp_async_ca<16>(target + i * sizeof(chunk[0]), from + i * sizeof(uint4), 16);
    }

    template <class Kept>
    __device__ void put(int share, const float (&values)[2][8]) {
        RowShares<Kept, 1> packed;
        packed.pack(0, values);
        packed.put(&of<Kept>(share), produce_threads);
    }
    template <class Kept>
    __device__ void get(int share, float (&values)[2][8]) {
        RowShares<Kept, 1> packed;
        packed.get(&of<Kept>(share), produce_threads);
        packed.unpack(0, values);
    }
};

struct NormRowsShared {
    NormShared sums;
    KeptRows kept;
};

// y[rows, cols] = (v - m) / sqrt(s + eps) (weight + offset) + bias, where v is x or x + residual, m is the mean of v if
// `centered`, else 0, and s is the mean square of v - m. The order of a row's sums depends on `cols` alone. Called by
// whole blocks of `produce_threads`. whole: everything is_whole(), and a whole row fits. sums: there may be a residual;
// true if not whole.
//
// A row is kept in shared memory, as loaded or, if it is a sum, as floats. Every pass loads again what does not fit. If
// two rows fit, the next one is in flight. Options are branches around all values of a share.
template <class Element, bool whole, bool sums>
__device__ inline void norm_rows(NormRowsShared &shared, const NormInput<Element> &input, const NormOptions &options,
                                 const Produced &y) {
    using Kept = std::conditional_t<sums, float, Element>;
    KeptRows &kept = shared.kept;
    const NormLanes place(y.cols);
    const int cols = y.cols, step = place.lanes * produce_share, column_0 = place.column(0);
    const int here = whole ? place.shares : min(place.shares, KeptRows::shares<Kept>);   // shares that are kept
    const bool copies = whole && !sums, ahead = copies && 2 * here <= KeptRows::shares<Kept>;
    const float count = cols;
    const int64_t end = y.end(), blocks_rows = int64_t(gridDim.x) * place.rows();
    const TypedRows<const char> weight(options.weight), bias(options.bias);
    // Most calls are one of two cases and need no other branch: weights of x's type alone, or all options of layernorm.
    enum { any, scaled, centered } usual = any;
    if (whole && !sums && !options.rounds && weight.holds<Element>()) {
        if (!options.centered && bias.type == bias.none) usual = scaled;
        if (options.centered && bias.holds<Element>()) usual = centered;
    }
    // Loads a share: x, or x + residual.
    const auto load = [&](int64_t row, int column, float (&values)[2][8]) {
        RowShares<Element, 1> of_x;
        of_x.template load<whole>(input.x + row * input.x_stride, column, 0, cols);
        of_x.unpack(0, values);
        if (!sums || !input.residual) return;
        RowShares<Element, 1> of_residual;
        float other[2][8];
        of_residual.template load<whole>(input.residual + row * input.residual_stride, column, 0, cols);
        of_residual.unpack(0, other);
#pragma unroll
        for (int i = 0; i < 16; ++i) values[i / 8][i % 8] += other[i / 8][i % 8];
        if (options.rounds) round_values<Element>(values);
    };
    // Starts copying a row to shared memory, from share `first` on.
    const auto begin = [&](int64_t row, int first) {
        const Element *source = input.x + y.present(row) * input.x_stride + column_0;
#pragma unroll 1
        for (int i = 0, column = column_0; i < here && column < cols; ++i, column += step, source += step)
            kept.begin(first + i, reinterpret_cast<const Kept *>(source));
        ptx::cp_async_commit_group();
    };
    // Shares past the end of a row stay zeros, in both rows if two fit.
#pragma unroll 1
    for (int share = 0; share < here; ++share) {
        if (place.column(share) < cols) continue;
        const float zeros[2][8] = {};
        kept.put<Kept>(share, zeros);
        if (ahead) kept.put<Kept>(here + share, zeros);
    }
    int turn = 0, kept_first = 0;
    if (ahead) begin(int64_t(blockIdx.x) * place.rows() + place.row(), kept_first);
#pragma unroll 1
    for (int64_t first = int64_t(blockIdx.x) * place.rows(); first < end; first += blocks_rows) {
        const int64_t row = first + place.row(), source = y.present(row);
        // This row to shared memory.
        if (copies) {
            begin(ahead ? row + blocks_rows : row, ahead ? kept_first ^ here : 0);
            if (ahead) ptx::cp_async_wait_group<1>();
            else ptx::cp_async_wait_group<0>();
        } else {
#pragma unroll 1
            for (int i = 0, column = column_0; i < here && column < cols; ++i, column += step) {
                float values[2][8];
                load(source, column, values);
                kept.put<Kept>(i, values);
            }
        }
        const auto get = [&](int share, int column, float (&values)[2][8]) {
            if (whole || share < here) kept.get<Kept>(kept_first + share, values);
            else load(source, column, values);
        };
        // The sums of add(column, values) over the shares of the row.
        const auto each_share = [&](auto &&add) {
#pragma unroll 1
            for (int share = 0, column = column_0; share < place.shares && column < cols; ++share, column += step) {
                float values[2][8];
                get(share, column, values);
                add(column, values);
            }
        };
        // The mean and the mean square.
        float mean = 0.0f, rest = 0.0f, squares;   // the mean in two parts: `rest` is its rounding error
        float2 sum = {};
        if (options.centered) {
            each_share([&](int, const float (&some)[2][8]) {
#pragma unroll
                for (int i = 0; i < 8; ++i) sum.x += some[0][i], sum.y += some[1][i];
            });
            mean = row_sums<false>(shared.sums, turn, place.lanes, {sum.x + sum.y, 0.0f}).x / count;
            sum = {};
            each_share([&](int column, const float (&some)[2][8]) {
#pragma unroll
                for (int i = 0; i < 16; ++i) {
                    const float off = whole || column + i < cols ? some[i / 8][i % 8] - mean : 0.0f;
                    sum.x += off;
                    sum.y = fmaf(off, off, sum.y);
                }
            });
            sum = row_sums<true>(shared.sums, turn, place.lanes, sum);
            rest = sum.x / count;
            squares = sum.y / count - rest * rest;
        } else {
            each_share([&](int, const float (&some)[2][8]) {
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    sum.x = fmaf(some[0][i], some[0][i], sum.x), sum.y = fmaf(some[1][i], some[1][i], sum.y);
            });
            squares = row_sums<false>(shared.sums, turn, place.lanes, {sum.x + sum.y, 0.0f}).x / count;
        }
        // The output, share by share.
        const float factor = 1.0f / sqrtf(squares + options.eps);
        const auto target = y.row(row);
#pragma unroll 1
        for (int share = 0, column = column_0; share < place.shares; ++share, column += step) {
            float some[2][8], more[2][8] = {};
            const int left = cols - column, at = left > 0 ? column : 0;   // past the end, any share
            const auto each = [&some](auto &&change) {
#pragma unroll
                for (int i = 0; i < 16; ++i) change(some[i / 8][i % 8], i);
            };
            const auto centre = [&](float &value, int) { value = (value - mean - rest) * factor; };
            const auto scale = [&](float &value, int) { value *= factor; };
            const auto weigh = [&](float &value, int i) { value *= more[i / 8][i % 8] + options.offset; };
            const auto move = [&](float &value, int i) { value += more[i / 8][i % 8]; };
            get(share, at, some);
            if (usual == scaled) {
                weight.template load_of<true, Element>(at, left, more);
                each(scale);
                each(weigh);
            } else if (usual == centered) {
                weight.template load_of<true, Element>(at, left, more);
                each(centre);
                each(weigh);
                bias.template load_of<true, Element>(at, left, more);
                each(move);
            } else {
                if (sums && input.total && row < y.rows && left > 0)
                    store_values<whole>(input.total + row * input.total_stride + column, left, some);
                if (options.centered) each(centre);
                else each(scale);
                if (options.rounds) round_values<Element>(some);
                if (weight.type) {
                    weight.load<whole>(at, left, more);
                    each(weigh);
                }
                if (bias.type) {
                    bias.load<whole>(at, left, more);
                    each(move);
                }
            }
            y.store<whole>(target, column, some);
        }
        if (row >= y.rows && row < end) y.clear(row, place.lane(), place.lanes);
        if (ahead) kept_first ^= here;
    }
}

template <class Element>
__device__ inline void norm_rows(NormRowsShared &shared, const NormInput<Element> &input, const NormOptions &options,
                                 const Produced &y) {
    const bool whole = input.is_whole(y.cols) && y.is_whole() && is_chunk(options.weight.bf16) &&
                       is_chunk(options.weight.f16) && is_chunk(options.weight.f32) && is_chunk(options.bias.bf16) &&
                       is_chunk(options.bias.f16) && is_chunk(options.bias.f32);
    const bool sums = input.residual || input.total;
    const int kept = sums ? KeptRows::shares<float> : KeptRows::shares<Element>;
    if (!whole || NormLanes(y.cols).shares > kept) norm_rows<Element, false, true>(shared, input, options, y);
    else if (sums) norm_rows<Element, true, true>(shared, input, options, y);
    else norm_rows<Element, true, false>(shared, input, options, y);
}

}   // namespace op
