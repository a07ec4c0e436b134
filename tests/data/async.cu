// Asynchronous copies as C++ writes them: barriers and pipelines of the standard library, bulk and tensor copies.
// nvcc -std=c++17 -arch=compute_120f -ptx async.cu -o async.ptx
#include <cuda/barrier>
#include <cuda/pipeline>
#include <cuda/ptx>
#include <cuda/std/utility>

namespace ptx = cuda::ptx;
using barrier = cuda::barrier<cuda::thread_scope_block>;

// out = reversed in, twice over a block's barrier; a quarter of the threads leaves in between. 128 threads.
extern "C" __global__ void library_barrier(int* out, const int* in)
{
    __shared__ barrier ready;
    __shared__ int buffer[128];
    if (threadIdx.x == 0)
        init(&ready, blockDim.x);
    __syncthreads();
    cuda::memcpy_async(buffer + threadIdx.x, in + threadIdx.x, sizeof(int), ready);
    ready.arrive_and_wait();
    int value = buffer[127 - threadIdx.x];
    barrier::arrival_token token = ready.arrive();
    ready.wait(cuda::std::move(token));
    buffer[threadIdx.x] = value + 1;
    if (threadIdx.x >= 96) {
        (void)ready.arrive_and_drop();
        return;
    }
    ready.arrive_and_wait();
    out[threadIdx.x] = buffer[threadIdx.x + 32];
}

// out[i] = sum of `tiles` tiles of 128 numbers, double buffered through a pipeline of the block. 128 threads.
extern "C" __global__ void library_pipeline(int* out, const int* in, int tiles)
{
    __shared__ cuda::pipeline_shared_state<cuda::thread_scope_block, 2> state;
    __shared__ int buffer[2][128];
    struct Block {
        __device__ unsigned size() const { return blockDim.x; }
        __device__ unsigned thread_rank() const { return threadIdx.x; }
        __device__ void sync() const { __syncthreads(); }
    } block;
    auto pipe = cuda::make_pipeline(block, &state);
    int sum = 0;
    for (int tile = 0; tile < tiles + 1; tile++) {
        if (tile < tiles) {
            pipe.producer_acquire();
            cuda::memcpy_async(&buffer[tile % 2][threadIdx.x], in + tile * 128 + threadIdx.x, sizeof(int), pipe);
            pipe.producer_commit();
        }
        if (tile > 0) {
            pipe.consumer_wait();
            sum += buffer[(tile - 1) % 2][127 - threadIdx.x];
            pipe.consumer_release();
        }
    }
    out[threadIdx.x] = sum;
}

// Rows of 64 numbers of 16 bits through a ring of tiles: one warp copies, four wait, add one, and copy out again.
struct alignas(64) Map {
    char bytes[128];
};

__device__ inline unsigned address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

constexpr int rows = 8, stages = 3;

extern "C" __global__ void __launch_bounds__(160) ring(const __grid_constant__ Map in, const __grid_constant__ Map out, int tiles)
{
    __shared__ alignas(1024) unsigned short tile[stages][rows][64];
    __shared__ uint64_t full[stages], empty[stages];
    int const warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < stages; i++) {
            ptx::mbarrier_init(&full[i], 1);
            ptx::mbarrier_init(&empty[i], 4);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (warp == 4) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        unsigned leader;
        asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(leader));
        if (leader) {
            asm volatile("prefetch.tensormap [%0];" ::"l"(&in) : "memory");
            for (int i = 0; i < tiles; i++) {
                int const stage = i % stages, round = i / stages;
                while (!ptx::mbarrier_try_wait_parity(&empty[stage], round % 2 ^ 1)) {
                }
                ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &full[stage], sizeof tile[0]);
                asm volatile("cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
                                 address(tile[stage])),
                             "l"(&in), "r"(0), "r"(i * rows), "r"(address(&full[stage]))
                             : "memory");
            }
        }
        return;
    }
    for (int i = 0; i < tiles; i++) {
        int const stage = i % stages, round = i / stages;
        while (!ptx::mbarrier_try_wait_parity(&full[stage], round % 2)) {
        }
        for (int j = threadIdx.x; j < rows * 64; j += 128)
            (&tile[stage][0][0])[j] += 1;
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        asm volatile("bar.sync 1, 128;" ::: "memory");
        if (threadIdx.x == 0) {
            asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&out), "r"(0), "r"(i * rows),
                         "r"(address(tile[stage]))
                         : "memory");
            ptx::cp_async_bulk_commit_group();
            ptx::cp_async_bulk_wait_group_read(ptx::n32_t<0>());
        }
        asm volatile("bar.sync 1, 128;" ::: "memory");
        if (threadIdx.x % 32 == 0)
            (void)ptx::mbarrier_arrive(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &empty[stage]);
    }
}
