// How a warp goes through the chunks of its rows: a lane has one chunk of every `step`-th row.
#pragma once

#include "../ptx/warp.cuh"

namespace tile {

// Rows of `chunks` chunks, of which consecutive lanes have consecutive ones. If `chunks` does not divide 32, some lanes
// have none.
template <int chunks>
struct WalkedChunks {
    static_assert(chunks <= 32, "the lanes hold a row");
    static constexpr int step = 32 / chunks;

    __device__ static bool any() { return 32 % chunks == 0 || ptx::laneid() < step * chunks; }
    __device__ static int first_row() { return ptx::laneid() / chunks; }
    __device__ static int chunk() { return ptx::laneid() % chunks; }
};

}   // namespace tile
