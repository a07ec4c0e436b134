// Atomics on global, shared and generic addresses.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

extern "C" __global__ void atomics(int *i, unsigned *u, unsigned long long *l, float *f, double *d, __half2 *h, __nv_bfloat162 *b, int *olds) {
    __shared__ int counter;
    __shared__ unsigned long long big;
    if (threadIdx.x == 0) { counter = 0; big = 0; }
    __syncthreads();
    const int t = blockIdx.x * blockDim.x + threadIdx.x;
    olds[t] = atomicAdd(&i[0], 1 + t % 3);
    atomicSub(&i[1], t);
    atomicMin(&i[2], 50 - t);
    atomicMax(&i[3], t * 3);
    atomicAnd(&i[4], ~(1 << t % 32));
    atomicOr(&i[5], 1 << t % 29);
    atomicXor(&i[6], t);
    atomicInc(&u[0], 6);
    atomicDec(&u[1], 9);
    atomicMax(&u[2], 0xfffffff0u - t);
    atomicExch(&u[3], t);
    atomicAdd(&l[0], 0x100000001ull * t);
    atomicMax(&l[1], (unsigned long long)t << 33);
    atomicCAS(&u[4 + t % 4], 0u, t + 1);
    atomicAdd(&f[t % 2], 0.5f * t);
    atomicAdd(&d[0], 1.0 / (1 + t));
    atomicAdd(h, __floats2half2_rn(0.5f, -1.0f));
    atomicAdd(b, __floats2bfloat162_rn(1.0f, 0.25f));
    atomicAdd(&counter, 2);
    atomicAdd(&big, 3ull << 32);
    int *generic = t % 2 ? &counter : &i[7];
    atomicAdd(generic, 1);
    __syncthreads();
    if (threadIdx.x == 0) {
        atomicAdd(&i[8], counter);
        atomicAdd(&l[2], big);
    }
}
