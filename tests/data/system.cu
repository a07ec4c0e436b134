// Calls of the driver's functions and cooperative groups: printf, assert, a grid that synchronizes, tiles of a block.
// Compiled with -lineinfo; run by tests/emulator/test_system.py.
#include <cooperative_groups.h>
#include <cstdio>
#include <cassert>
namespace cg = cooperative_groups;
extern "C" __global__ void printing(const int* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n && x[i] % 3 == 0)
        printf("%d: %5d|%-6u|%+d|%05d|%x|%#X|%o|%c|%%|%lld|%llu|%hhd|%zu\n", i, x[i], 7u, x[i], x[i], 255u, 255u, 8u, 'a' + i % 26, (long long)x[i] << 33, 1ull << 63, (char)-3, sizeof(int));
    if (i == 1) printf("%f|%10.3f|%e|%g|%G|%a|%s|%8.3s|%p|%*d|%.*f\n", 1.5, -2.0625, 12345.678, 1e-5, 1e20, 1.5, "text", "abcdef", (void*)16, 6, 42, 2, 3.14159);
    if (i == 0) printf("no arguments\n");
}
extern "C" __global__ void asserting(const int* x) {
    assert(x[threadIdx.x] < 30);
}
extern "C" __global__ void grid_sum(int* parts, int* out) {
    cg::grid_group grid = cg::this_grid();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    parts[i] = i + 1;
    for (int step = grid.size() / 2; step; step /= 2) {
        grid.sync();
        if (i < step) parts[i] += parts[i + step];
    }
    grid.sync();
    if (i == 0) *out = parts[0];
}
extern "C" __global__ void tiles(const int* x, int* out) {
    auto block = cg::this_thread_block();
    auto tile = cg::tiled_partition<8>(block);
    int v = x[block.thread_rank()];
    for (int d = 4; d; d /= 2) v += tile.shfl_xor(v, d);
    block.sync();
    out[block.thread_rank()] = v + tile.any(v > 100) + (int)tile.ballot(v & 1);
}
extern "C" __global__ void wide_tiles(const int* x, int* out) {
    auto tile = cg::tiled_partition<64>(cg::this_thread_block());
    int v = x[threadIdx.x];
    out[threadIdx.x] = tile.shfl(v, 40) + 1000 * tile.meta_group_rank() + 10000 * tile.any(v == 70);
    tile.sync();
}
