// Reductions of rows: the means over the rows of sequences, and the place of the largest value of a row.
#pragma once

#include <cstdint>

#include "../ptx/barrier.cuh"
#include "../ptx/warp.cuh"
#include "produce.cuh"

namespace op {

constexpr int mean_threads = 256, mean_columns = 8, mean_ahead = 4;
constexpr int mean_pass = mean_threads * mean_columns;   // columns of a block at a time

struct MeanShared {
    float sums[mean_threads][mean_columns + 1];   // one more column, so that rows begin in different banks
    float of_warp[mean_threads / 32];
};

// How the threads of a block divide rows of `cols` values, which depends on `cols` alone. A lane has eight columns, a
// team the least power of two of lanes that covers a row. A block has as many teams as fit, each with its own rows.
struct MeanLanes {
    int lanes = 1;

    __device__ explicit MeanLanes(int cols) {
        while (lanes < mean_threads && lanes * mean_columns < cols) lanes *= 2;
    }
    __device__ int teams() const { return mean_threads / lanes; }
    __device__ int team() const { return threadIdx.x / lanes; }
    __device__ int column() const { return threadIdx.x % lanes * mean_columns; }
};

// The means of this lane's eight columns from `column` on over the rows begin .. end - 1 of x, in the lanes of team 0.
// A team adds every teams-th row, four in a tree and fours in sequence. Teams are added in pairs, pairs of pairs and so
// on.
template <class Element>
__device__ inline void column_means(MeanShared &shared, const MeanLanes &place, const Element *x, int64_t stride,
                                    int64_t begin, int64_t end, int column, int cols, float (&means)[mean_columns]) {
    const int teams = place.teams();
    const bool whole = cols % 8 == 0 && is_chunk(x) && stride * sizeof(Element) % 16 == 0;
#pragma unroll
    for (float &mean : means) mean = 0.0f;
#pragma unroll 1
    for (int64_t first = begin + place.team(); first < end; first += mean_ahead * teams) {
        tile::Eight<Element> eights[mean_ahead];
#pragma unroll
        for (int i = 0; i < mean_ahead; ++i) {
            const int64_t row = first + i * teams;
            if (row >= end || column >= cols) eights[i].clear();
            else if (whole) eights[i].load(x + row * stride + column);
            else eights[i].load(x + row * stride + column, cols - column);
        }
        float values[mean_ahead][mean_columns];
#pragma unroll
        for (int i = 0; i < mean_ahead; ++i) eights[i].unpack(values[i]);
#pragma unroll
        for (int j = 0; j < mean_columns; ++j)
            means[j] += (values[0][j] + values[1][j]) + (values[2][j] + values[3][j]);
    }
    ptx::bar_sync();   // all threads have read the sums of the pass before
#pragma unroll
    for (int j = 0; j < mean_columns; ++j) shared.sums[threadIdx.x][j] = means[j];
#pragma unroll 1
    for (int apart = 1; apart < teams; apart *= 2) {
        ptx::bar_sync();   // all threads see the sums over `apart` teams
        if (place.team() % (2 * apart)) continue;
#pragma unroll
        for (int j = 0; j < mean_columns; ++j) {
            means[j] += shared.sums[threadIdx.x + apart * place.lanes][j];
            shared.sums[threadIdx.x][j] = means[j];
        }
    }
    const float count = end - begin;
#pragma unroll
    for (float &mean : means) mean = end > begin ? mean / count : 0.0f;
}

// y[sequence] = the mean of the rows starts[sequence] .. starts[sequence + 1] - 1 of x[tokens, cols], divided by its
// length if `normalize`; zeros if there are no rows or the length is 0. The order of sums depends on `cols` and the
// number of rows. A block has one sequence.
template <class Element>
__device__ inline void mean_rows(MeanShared &shared, const Element *x, int64_t stride, const int *starts,
                                 bool normalize, const OutputRows &y, int64_t tokens, int cols) {
    const int sequence = blockIdx.x;
    const int64_t begin = starts[sequence] < 0 ? 0 : starts[sequence];
    const int64_t end = starts[sequence + 1] < tokens ? starts[sequence + 1] : tokens;
    const MeanLanes place(cols);
    // The length of the means, if they are normalized.
    float means[1][mean_columns], factor = 1.0f;
    if (normalize) {
        float squares = 0.0f;
#pragma unroll 1
        for (int column = place.column(); column - place.column() < cols; column += mean_pass) {
            column_means(shared, place, x, stride, begin, end, column, cols, means[0]);
            float some = 0.0f;
#pragma unroll
            for (float mean : means[0]) some = fmaf(mean, mean, some);
            squares += some;
        }
        if (place.team()) squares = 0.0f;
#pragma unroll
        for (int mask = 1; mask < 32; mask *= 2) squares += ptx::shfl_sync_bfly_f32(squares, mask);
        if (threadIdx.x % 32 == 0) shared.of_warp[threadIdx.x / 32] = squares;
        ptx::bar_sync();   // all threads see the results of every warp
        squares = shared.of_warp[threadIdx.x % (mean_threads / 32)];
#pragma unroll
        for (int mask = 1; mask < mean_threads / 32; mask *= 2) squares += ptx::shfl_sync_bfly_f32(squares, mask);
        factor = squares == 0.0f ? 0.0f : 1.0f / sqrtf(squares);
    }
    // The means.
    const bool there = normalize && cols <= mean_pass;   // the means of all columns, still in registers
#pragma unroll 1
    for (int column = place.column(); column - place.column() < cols; column += mean_pass) {
        if (!there) column_means(shared, place, x, stride, begin, end, column, cols, means[0]);
#pragma unroll
        for (float &mean : means[0]) mean *= factor;
        if (!place.team() && column < cols) store_share(y, sequence, column, cols, means);
    }
}

constexpr int argmax_threads = 512, argmax_ahead = 8;

struct ArgmaxShared {
    uint2 of_warp[argmax_threads / 32];
};

// A number that increases with x: zeros are equal, NaN is above all values, and 0 is below all.
__device__ inline uint32_t order_of(float x) {
    const uint32_t bits = __float_as_uint(x + 0.0f);
    return x != x ? 0xffffffffu : bits ^ (uint32_t(int(bits) >> 31) | 0x80000000u);
}

// The order of the largest value so far, and the place of its first one.
struct Largest {
    uint32_t order = 0, place = 0xffffffffu;

    __device__ void take(uint32_t other, uint32_t where) {
        if (other > order || (other == order && where < place)) order = other, place = where;
    }
    template <int count>
    __device__ void take_lanes() {
#pragma unroll
        for (int mask = 1; mask < count; mask *= 2)
            take(ptx::shfl_sync_bfly_b32(order, mask), ptx::shfl_sync_bfly_b32(place, mask));
    }
};

// The largest of a thread's values of a row, and the number of the 16 bytes in which it is first. whole: the row is a
// multiple of 16 bytes, at a multiple of 16 bytes.
template <bool whole, class Element>
__device__ inline Largest largest_chunk(const Element *row, int chunks, int cols) {
    constexpr int count = tile::elements_per_chunk<Element>, ahead = whole ? argmax_ahead : 1;
    float largest = -INFINITY;
    int where = threadIdx.x;
#pragma unroll 1
    for (int first = threadIdx.x; first < chunks; first += ahead * argmax_threads) {
        // Loads of several chunks; past the end, of the last one again.
        const auto place = [&](int i) { return min(first + i * argmax_threads, chunks - 1); };
        uint4 chunk[ahead];
#pragma unroll
        for (int i = 0; i < ahead; ++i) {
            if constexpr (whole) {
                chunk[i] = __ldg(reinterpret_cast<const uint4 *>(row) + place(i));
            } else {
                float values[count];
#pragma unroll
                for (int j = 0; j < count; ++j) values[j] = float(row[min(first * count + j, cols - 1)]);
                chunk[i] = tile::pack(values, Element{});
            }
        }
#pragma unroll
        for (int i = 0; i < ahead; ++i) {
            float values[count];
            tile::unpack(chunk[i], values, Element{});
            float most = values[0];
#pragma unroll
            for (int j = 1; j < count; ++j) most = ptx::max_nan_f32(most, values[j]);
            if (!(most <= largest) && largest == largest) largest = most, where = place(i);
        }
    }
    if (threadIdx.x >= chunks) return {};
    return {order_of(largest), uint32_t(where)};
}

// places[row] = the column of the largest value of x[row, cols]. A block has one row. Its threads find the 16 bytes in
// which the value is first, then its place there.
template <class Element>
__device__ inline void argmax_rows(ArgmaxShared &shared, const Element *x, int64_t stride, int *places, int cols) {
    constexpr int count = tile::elements_per_chunk<Element>;
    const Element *const row = x + blockIdx.x * stride;
    const int chunks = ceil_div(cols, count);
    Largest found = cols % count == 0 && is_chunk(row) ? largest_chunk<true>(row, chunks, cols)
                                                       : largest_chunk<false>(row, chunks, cols);
    found.take_lanes<32>();
    if (threadIdx.x % 32 == 0) shared.of_warp[threadIdx.x / 32] = {found.order, found.place};
    ptx::bar_sync();   // the first warp sees the results of every warp
    if (threadIdx.x >= 32) return;
    const uint2 other = shared.of_warp[threadIdx.x % (argmax_threads / 32)];
    found = {other.x, other.y};
    found.take_lanes<argmax_threads / 32>();
    const uint32_t column = found.place * count + threadIdx.x % count;
    const bool is_it = column < uint32_t(cols) && order_of(float(row[column])) == found.order;
    const uint32_t lanes = ptx::vote_sync_ballot(is_it);
    if (threadIdx.x == 0) places[blockIdx.x] = found.place * count + __ffs(lanes) - 1;
}

}   // namespace op
