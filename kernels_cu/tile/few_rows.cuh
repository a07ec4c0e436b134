// Positions of a lane in products of few rows: its share of a row of A, and its chunks of lines of B.
#pragma once

#include "../ptx/warp.cuh"

namespace tile {

// A row is read in steps of 4 * values. Lane 4 g + t has values values * t .. values * (t + 1) - 1 of row g.
template <int values>
struct StepShare {
    __device__ static int row() { return ptx::laneid() / 4; }
    __device__ static int first() { return ptx::laneid() % 4 * values; }
};

// Lines of 128 bytes in shared memory, a row to a line. Chunk c of 16 bytes of row r lies at c ^ swizzle(r), so that
// neither access has bank conflicts: 8 lanes copy a line; 2, 4 or 8 rows of 4 lanes, `bytes` each, are read at once.
template <int bytes>
struct SwizzledLines {
    static constexpr int line = 128;

    __device__ static int swizzle(int row) { return row * (bytes / 4) % 8; }

    int row, chunk;   // that this lane copies, of 4 rows
    int target;       // offset of that chunk
    int from;         // offset where this lane reads the first step of 8 rows

    __device__ SwizzledLines() {
        const int lane = ptx::laneid();
        row = lane / 8, chunk = lane % 8;
        target = line * row + 16 * (chunk ^ swizzle(row));
        from = line * (lane / 4) + (bytes * (lane % 4) ^ 16 * swizzle(lane / 4));
    }
};

}   // namespace tile
