// One mistake in each kernel, for the emulator's messages: compiled with -lineinfo, run by tests/emulator/test_faults.py.
#include <cuda_pipeline.h>

extern "C" __global__ void outside(int *p) {
    p[blockIdx.x * blockDim.x + threadIdx.x] = 1;
}

extern "C" __global__ void misaligned(char *p) {
    *reinterpret_cast<int *>(p + 3 * threadIdx.x) = 1;
}

extern "C" __global__ void past_shared(int *p) {
    __shared__ int s[64];
    s[threadIdx.x] = 1;
    __syncthreads();
    p[threadIdx.x] = s[threadIdx.x + 1];
}

extern "C" __global__ void unwritten(int *p, int count) {
    int values[8];
    for (int i = 0; i < count; ++i) values[i] = i * threadIdx.x;
    p[threadIdx.x] = values[threadIdx.x % 8];
}

extern "C" __global__ void no_wait(const int4 *x, int4 *y) {
    __shared__ int4 s[32];
    __pipeline_memcpy_async(&s[threadIdx.x], &x[threadIdx.x], 16);
    __pipeline_commit();
    y[threadIdx.x] = s[threadIdx.x];
}

extern "C" __global__ void parted(int *p) {
    int value = 0;
    if (threadIdx.x < 16) value = __shfl_sync(0xffffffff, threadIdx.x, 3);
    __syncthreads();
    p[threadIdx.x] = value;
}

extern "C" __global__ void half_a_warp(int *p) {
    __shared__ int s[64];
    s[threadIdx.x] = 1;
    if (threadIdx.x < 16) {
        unsigned word;
        asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(word) : "r"((unsigned)__cvta_generic_to_shared(s)));
        p[threadIdx.x] = word;
    }
}

extern "C" __global__ void deadlock(int *p) {
    if (threadIdx.x < 32)
        asm volatile("bar.sync 1, 64;" ::: "memory");
    else
        asm volatile("bar.sync 2, 64;" ::: "memory");
    p[threadIdx.x] = 1;
}

extern "C" __global__ void no_barrier(int *p) {
    __shared__ int s[64];
    s[threadIdx.x] = threadIdx.x;
    p[threadIdx.x] = s[63 - threadIdx.x];
}

extern "C" __global__ void endless(volatile int *p) {
    while (p[0] == 0) {}
}
