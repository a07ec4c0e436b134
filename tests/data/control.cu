// Control flow: loops that end at different times, early exits, warps that work on different things, grids in three dimensions.
#include <cstdint>

extern "C" __global__ void collatz(int *steps, const unsigned *start, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    unsigned long long x = start[i];
    int count = 0;
    while (x != 1) {
        x = x & 1 ? 3 * x + 1 : x / 2;
        if (++count == 500) break;
    }
    steps[i] = count;
}

// Warp 0 produces, the others consume, over two named barriers and a buffer of two stages.
extern "C" __global__ void producer(int *out, const int *in, int rounds) {
    __shared__ int stage[2][96];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp == 0) {
        for (int r = 0; r < rounds; ++r) {
            if (r >= 2) asm volatile("bar.sync %0, 128;" ::"r"(3 + (r & 1)) : "memory");
            for (int w = 0; w < 3; ++w) stage[r & 1][32 * w + lane] = in[r * 96 + 32 * w + lane] * 2;
            asm volatile("bar.arrive %0, 128;" ::"r"(1 + (r & 1)) : "memory");
        }
    } else {
        int sum = 0;
        for (int r = 0; r < rounds; ++r) {
            asm volatile("bar.sync %0, 128;" ::"r"(1 + (r & 1)) : "memory");
            sum += stage[r & 1][(32 * (warp - 1) + lane + r) % 96];
            if (r + 2 < rounds) asm volatile("bar.arrive %0, 128;" ::"r"(3 + (r & 1)) : "memory");
        }
        out[blockIdx.x * 96 + 32 * (warp - 1) + lane] = sum;
    }
}

extern "C" __global__ void cube(int *out, int nx, int ny, int nz) {
    const int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y, z = blockIdx.z * blockDim.z + threadIdx.z;
    if (x < nx && y < ny && z < nz) out[(z * ny + y) * nx + x] = x + 100 * y + 10000 * z;
}

// Blocks of any size: a sum over the block in shared memory, with warps that are not full.
extern "C" __global__ void block_sum(int *out, const int *in, int n) {
    __shared__ int part[32];
    int sum = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) sum += in[blockIdx.x * n + i];
    part[threadIdx.x % 32] = 0;
    __syncthreads();
    atomicAdd(&part[threadIdx.x % 32], sum);
    __syncthreads();
    if (threadIdx.x == 0) {
        int total = 0;
        for (int i = 0; i < min(32, (int)blockDim.x); ++i) total += part[i];
        out[blockIdx.x] = total;
    }
}

extern "C" __global__ void warp_sum(int *out, const int *in) {
    int value = in[threadIdx.x];
    if (threadIdx.x % 32 >= 16) {
        for (int offset = 8; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffff0000, value, offset);
    } else {
        for (int offset = 8; offset > 0; offset /= 2) value = max(value, __shfl_xor_sync(0x0000ffff, value, offset));
    }
    const unsigned ballot = __ballot_sync(0xffffffff, value & 1);
    out[threadIdx.x] = value + __popc(ballot);
}

// A lock that the threads of one warp take in turn.
extern "C" __global__ void ticket(int *out, int *counter) {
    const int mine = atomicAdd(counter, 1);
    int spins = 0;
    while (atomicAdd(counter + 1, 0) != mine) ++spins;
    out[mine] = threadIdx.x;
    __threadfence();
    atomicExch(counter + 1, mine + 1);
}

typedef int (*Function)(int);
extern "C" __global__ void jump(int *out, const int *in) {
    int x = in[threadIdx.x];
    switch (x % 13) {
        case 0: x = x * 3 + 1; break;
        case 1: x = x ^ 0x55; break;
        case 2: x = x << 2; break;
        case 3: x = x * x; break;
        case 4: x = x - 77; break;
        case 5: x = ~x; break;
        case 6: x = x / 3; break;
        case 7: x = x % 5; break;
        case 8: x = x | 1024; break;
        case 9: out[threadIdx.x] = -1; return;
        case 10: x = x + threadIdx.x; break;
        case 11: x = x * 7; break;
        default: x = 0;
    }
    out[threadIdx.x] = x;
}
