// A little of everything nvcc emits: struct parameters, tables, initialized pointers, a call that stays a call, local arrays,
// dynamic and static shared memory, a switch.
#include <cuda_fp16.h>

struct Numbers {
    int a;
    float b[3];
    double c;
};

__constant__ float table[8] = {1, 2, 3, 4, 5, 6, 7, 8};
__device__ int count = 5;
__device__ int *pointer = &count;

__device__ __noinline__ float helper(float x, int n, Numbers p) {
    float sum = 0;
    for (int i = 0; i < n; ++i) sum += x * p.b[i % 3] + table[i & 7];
    return sum;
}

extern "C" __global__ void __launch_bounds__(128) features(float *out, const float *__restrict__ in, Numbers p, int n) {
    extern __shared__ float values[];
    __shared__ int counts[4];
    float local[16];
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (threadIdx.x < 4) counts[threadIdx.x] = 0;
    __syncthreads();
    values[threadIdx.x] = in[i];
    atomicAdd(&counts[threadIdx.x & 3], 1);
    for (int j = 0; j < 16; ++j) local[(j * n) & 15] = in[i] * j;
    __syncthreads();
    float sum = helper(values[threadIdx.x ^ 1], n, p);
    for (int j = 0; j < n; ++j) sum += local[j & 15];
    switch (n & 15) {
        case 0: sum += 1; break;
        case 1: sum *= 2; break;
        case 3: sum = sqrtf(sum); break;
        case 5: sum = sum / 3.7f; break;
        case 7: sum = expf(sum * 1e-3f); break;
        case 9: sum = sinf(sum); break;
    }
    out[i] = sum + counts[i & 3] + *pointer + __half2float(__float2half(p.a + (float)p.c));
}
