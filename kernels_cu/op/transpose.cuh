// Matrix transposition twice: naive, and through a tile in shared memory, which makes loads and stores coalesced.
#pragma once

#include "../ptx/barrier.cuh"

namespace op {

constexpr int transpose_tile = 32;   // a warp reads or writes one row of a tile
constexpr int transpose_rows = 8;    // rows of a tile that the block's 32 x 8 threads cover at a time

// y[cols][rows] = x[rows][cols] transposed. Neighbouring threads read neighbouring columns and write `rows` elements
// apart.
__device__ inline void transpose_naive(const float *x, float *y, int rows, int cols) {
    const int col = blockIdx.x * transpose_tile + threadIdx.x;
    for (int i = threadIdx.y; i < transpose_tile; i += transpose_rows) {
        const int row = blockIdx.y * transpose_tile + i;
        if (row < rows && col < cols) y[size_t(col) * rows + row] = x[size_t(row) * cols + col];
    }
}

// 33 floats to a row: the elements of a column are then in 32 different banks.
struct TransposeShared {
    float tile[transpose_tile][transpose_tile + 1];
};

// The same result, by way of a tile in shared memory that is read by columns.
__device__ inline void transpose_tiled(TransposeShared &shared, const float *x, float *y, int rows, int cols) {
    const int first_row = blockIdx.y * transpose_tile, first_col = blockIdx.x * transpose_tile;
    for (int i = threadIdx.y; i < transpose_tile; i += transpose_rows) {
        const int row = first_row + i, col = first_col + threadIdx.x;
        if (row < rows && col < cols) shared.tile[i][threadIdx.x] = x[size_t(row) * cols + col];
    }
    ptx::bar_sync();   // all threads see the tile
    for (int i = threadIdx.y; i < transpose_tile; i += transpose_rows) {
        const int row = first_row + threadIdx.x, col = first_col + i;
        if (row < rows && col < cols) y[size_t(col) * rows + row] = shared.tile[threadIdx.x][i];
    }
}

}   // namespace op
