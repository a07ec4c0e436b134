// Mixtures of experts: tokens sorted by expert, and the weighted sum of the results of their experts.
#pragma once

#include <cstdint>

#include "../kernel.cuh"
#include "../ptx/barrier.cuh"
#include "../ptx/warp.cuh"
#include "../tile/format.cuh"
#include "../tile/lanes.cuh"
#include "ending.cuh"

namespace op {

constexpr int route_threads = 256, route_warps = route_threads / 32;

struct RouteShared {
    int counts[2][route_warps];
};

// The sum over the threads of a block. `turn` alternates between 0 and 1 from call to call, so that one barrier is
// enough.
__device__ inline int sum_of_block(RouteShared &shared, int turn, int count) {
    for (int mask = 16; mask > 0; mask /= 2) count += ptx::shfl_sync_bfly_b32(count, mask);
    if (tile::is_first_lane()) shared.counts[turn][threadIdx.x / 32] = count;
    ptx::bar_sync();   // all threads see the warps' sums
    int sum = 0;
    for (int i = 0; i < route_warps; ++i) sum += shared.counts[turn][i];
    return sum;
}

// Finds the rows of expert blockIdx.x among ids[count]; block `experts` finds the ids that name no expert. Rows keep
// the order of their ids.
//   order   [count]: the token of each row, which is the id's number divided by `chosen`
//   starts  [experts + 1]: where the rows of each expert begin; behind the last those of no expert
//   places  [count]: the row of each id, -1 for one of no expert
__device__ inline void route(RouteShared &shared, const int *ids, int *order, int *starts, int *places, int count,
                             int chosen, int experts) {
    const int mine = blockIdx.x;
    const auto expert_of = [experts](int id) { return id < 0 || id >= experts ? experts : id; };
    // Where the expert's rows begin.
    int before = 0;
    for (int i = threadIdx.x; i < count; i += route_threads) before += expert_of(ids[i]) < mine;
    int row = sum_of_block(shared, 0, before), turn = 1;
    if (threadIdx.x == 0) starts[mine] = row;
    // The rows, a block of ids at a time.
    for (int first = 0; first < count; first += route_threads, turn ^= 1) {
        const int i = first + threadIdx.x;
        const bool hit = i < count && expert_of(ids[i]) == mine;
        const uint32_t hits = ptx::vote_sync_ballot(hit);
        if (tile::is_first_lane()) shared.counts[turn][threadIdx.x / 32] = __popc(hits);
        ptx::bar_sync();   // all threads see the warps' counts
        int all = 0, earlier = 0;
        for (int warp = 0; warp < route_warps; ++warp) {
            const int of_warp = shared.counts[turn][warp];
            all += of_warp;
            earlier += warp < threadIdx.x / 32 ? of_warp : 0;
        }
        if (hit) {
            const int place = row + earlier + tile::lanes_before(hits);
            order[place] = i / chosen;
            places[i] = mine < experts ? place : -1;
        }
        row += all;
    }
}

constexpr int combine_threads = 128, combine_columns = 8 * combine_threads;

// y[tokens, cols]: for each token, the sum over its experts of weight times row of x, in float32, in the order of the
// experts.
template <class Element>
__device__ inline void combine(const Element *x, int64_t x_stride, const int *places, const float *weights, Element *y,
                               int64_t cols, int chosen) {
    const int column = blockIdx.x * combine_columns + 8 * threadIdx.x;
    const int64_t token = blockIdx.y;
    if (column >= cols) return;
    float sums[1][8] = {};
    for (int i = 0; i < chosen; ++i) {
        const int place = places[token * chosen + i];
        if (place < 0) continue;
        const float weight = weights[token * chosen + i];
        float values[1][8];
        load_share(x + place * x_stride + column, int(cols) - column, values);
#pragma unroll
        for (int j = 0; j < 8; ++j) sums[0][j] = fmaf(weight, values[0][j], sums[0][j]);
    }
    store_share(y + token * cols + column, int(cols) - column, sums);
}

}   // namespace op
