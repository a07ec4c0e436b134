// Every wrapper of kernels_cu/ptx that has a stand-in, alone: one launch gives registers in and registers out.
#include "kernel.cuh"
#include "ptx/bulk.cuh"
#include "ptx/access.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cvt.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma.cuh"
#include "ptx/mma_plain.cuh"
#include "ptx/warp.cuh"

using namespace ptx;

// One MMA to a warp: a, b, scale_a, scale_b and c are the registers of each lane.
#define MMA(name, ...)                                                                                                   \
    extern "C" __global__ void name(const uint4 *a_, const uint2 *b_, const uint32_t *scales_a, const uint32_t *scales_b, \
                                    float4 *c_) {                                                                        \
        const int i = 32 * blockIdx.x + threadIdx.x;                                                                     \
        const uint32_t a[4] = {a_[i].x, a_[i].y, a_[i].z, a_[i].w}, b[2] = {b_[i].x, b_[i].y};                           \
        [[maybe_unused]] const uint32_t scale_a = scales_a[i], scale_b = scales_b[i];                                                   \
        float c[4] = {c_[i].x, c_[i].y, c_[i].z, c_[i].w};                                                               \
        __VA_ARGS__;                                                                                                     \
        c_[i] = {c[0], c[1], c[2], c[3]};                                                                                \
    }

MMA(bf16, mma_m16n8k16_bf16(c, a, b))
MMA(f16, mma_m16n8k16_f16(c, a, b))

// Selectors differ between the pairs, so that together they cover all of them.
#define MXF8F6F4(first, second, ...) \
    MMA(mxf8f6f4_##first##_##second, mma_m16n8k32_mxf8f6f4<first, second, __VA_ARGS__>(c, a, b, scale_a, scale_b))
MXF8F6F4(E4m3, E4m3, 0, 0, 0, 0)
MXF8F6F4(E4m3, E5m2, 1, 1, 2, 1)
MXF8F6F4(E4m3, E2m1, 2, 0, 1, 2)
MXF8F6F4(E5m2, E4m3, 3, 1, 3, 3)
MXF8F6F4(E5m2, E5m2, 2, 1, 0, 2)
MXF8F6F4(E5m2, E2m1, 1, 0, 3, 1)
MXF8F6F4(E2m1, E4m3, 0, 1, 1, 0)
MXF8F6F4(E2m1, E5m2, 3, 0, 2, 3)
MXF8F6F4(E2m1, E2m1, 0, 0, 2, 2)
MXF8F6F4(E3m2, E2m3, 2, 1, 3, 0)
MXF8F6F4(E2m3, E3m2, 1, 1, 1, 1)
MXF8F6F4(E2m3, E4m3, 3, 0, 0, 2)
MXF8F6F4(E4m3, E3m2, 1, 0, 2, 3)
MXF8F6F4(E4m3, E2m3, 3, 1, 1, 1)
MXF8F6F4(E5m2, E3m2, 0, 0, 3, 2)
MXF8F6F4(E5m2, E2m3, 2, 1, 2, 0)
MXF8F6F4(E2m1, E3m2, 1, 1, 0, 3)
MXF8F6F4(E2m1, E2m3, 2, 0, 3, 1)
MXF8F6F4(E3m2, E4m3, 3, 1, 2, 2)
MXF8F6F4(E3m2, E5m2, 0, 1, 1, 3)
MXF8F6F4(E3m2, E2m1, 1, 0, 0, 0)
MXF8F6F4(E3m2, E3m2, 3, 0, 3, 3)
MXF8F6F4(E2m3, E5m2, 2, 1, 1, 0)
MXF8F6F4(E2m3, E2m1, 0, 1, 2, 1)
MXF8F6F4(E2m3, E2m3, 1, 1, 3, 2)

// Without scales. Accumulators in f16 come and go as f32.
#define UNSCALED(call, first, second) MMA(call##_##first##_##second, mma_m16n8k32_##call<first, second>(c, a, b))
#define IN_F16(call, first, second)                                                             \
    MMA(call##_f16_##first##_##second, {                                                        \
        uint32_t halves[2] = {cvt_rn_f16x2_f32(c[1], c[0]), cvt_rn_f16x2_f32(c[3], c[2])};      \
        mma_m16n8k32_##call<first, second>(halves, a, b);                                       \
        for (int k = 0; k < 4; ++k) c[k] = portable::f32_from_half(halves[k / 2], k % 2 != 0);  \
    })
UNSCALED(f8f6f4, E4m3, E2m1)
UNSCALED(f8f6f4, E5m2, E3m2)
UNSCALED(f8f6f4, E3m2, E2m3)
UNSCALED(f8f6f4, E2m3, E4m3)
UNSCALED(f8f6f4, E2m1, E5m2)
UNSCALED(fp8, E4m3, E5m2)
UNSCALED(fp8, E5m2, E4m3)
IN_F16(f8f6f4, E2m1, E3m2)
IN_F16(f8f6f4, E2m3, E2m1)
IN_F16(f8f6f4, E4m3, E4m3)
IN_F16(fp8, E4m3, E4m3)

#define MXF4(byte_a, thread_a, byte_b, thread_b)             \
    MMA(mxf4_##byte_a##thread_a##byte_b##thread_b,           \
        mma_m16n8k64_mxf4<byte_a, thread_a, byte_b, thread_b>(c, a, b, scale_a, scale_b))
MXF4(0, 0, 0, 0)
MXF4(2, 1, 0, 3)
MXF4(0, 1, 2, 2)
MXF4(2, 0, 2, 1)

#define NVF4(thread_a, thread_b) \
    MMA(mxf4nvf4_##thread_a##thread_b, mma_m16n8k64_mxf4nvf4<thread_a, thread_b>(c, a, b, scale_a, scale_b))
#define MXF4NVF4(byte_a, thread_a, byte_b, thread_b)         \
    MMA(mxf4nvf4_2x_##byte_a##thread_a##byte_b##thread_b,    \
        mma_m16n8k64_mxf4nvf4_2x<byte_a, thread_a, byte_b, thread_b>(c, a, b, scale_a, scale_b))
MXF4NVF4(0, 1, 2, 3)
MXF4NVF4(2, 0, 0, 1)

NVF4(0, 0)
NVF4(1, 1)
NVF4(0, 2)
NVF4(1, 3)

// A made ready once and used twice gives what two calls with registers give.
MMA(prepared, {
    const auto ready = prepare_mxf8f6f4_a<E4m3, 1, 1>(a, scale_a);
    mma_m16n8k32_mxf8f6f4<E4m3, E2m1, 1, 1, 0, 2>(c, ready, b, scale_b);
    mma_m16n8k32_mxf8f6f4<E4m3, E2m1, 1, 1, 3, 1>(c, ready, b, scale_b);
    const Mxf4A packed = prepare_mxf4_a<2, 1>(a, scale_a);
    mma_m16n8k64_mxf4<2, 1, 0, 2>(c, packed, b, scale_b);
    const Mxf4nvf4A scaled = prepare_mxf4nvf4_a<1>(a, scale_a);
    mma_m16n8k64_mxf4nvf4<1, 3>(c, scaled, b, scale_b);
})
MMA(unprepared, {
    mma_m16n8k32_mxf8f6f4<E4m3, E2m1, 1, 1, 0, 2>(c, a, b, scale_a, scale_b);
    mma_m16n8k32_mxf8f6f4<E4m3, E2m1, 1, 1, 3, 1>(c, a, b, scale_a, scale_b);
    mma_m16n8k64_mxf4<2, 1, 0, 2>(c, a, b, scale_a, scale_b);
    mma_m16n8k64_mxf4nvf4<1, 3>(c, a, b, scale_a, scale_b);
})

// Loads of 32 rows of 16 bytes whose addresses the lanes give in another order; registers[form][register][lane].
extern "C" __global__ void loads(const uint4 *rows, const uint32_t *order, uint32_t *registers) {
    __shared__ uint4 tile[32];
    const int lane = laneid();
    tile[lane] = rows[lane];
    bar_warp_sync();
    const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(&tile[order[lane]]));
    uint32_t r[8][4] = {};
    uint32_t two[2] = {};
    const auto keep = [&](uint32_t (&form)[4]) { form[0] = two[0], form[1] = two[1]; };
    ldmatrix_x1(r[0][0], address);
    ldmatrix_x1_trans(r[0][1], address);
    ldmatrix_x2(two, address), keep(r[1]);
    ldmatrix_x2_trans(two, address), keep(r[2]);
    ldmatrix_x4(r[3], address);
    ldmatrix_x4_trans(r[4], address);
    ldmatrix_m16n16_x1_trans_b8(two, address), keep(r[5]);
    ldmatrix_m16n16_x2_trans_b8(r[6], address);
    ldmatrix_m8n16_x4_b8x16_b4x16_p64(r[7], address);
    for (int i = 0; i < 32; ++i) registers[32 * i + lane] = r[i / 4][i % 4];
}

// Stores of the registers of four matrices to rows in another order; tiles[form] of 32 rows, zero where nothing is stored.
extern "C" __global__ void stores(const uint4 *registers, const uint32_t *order, uint4 *tiles) {
    __shared__ uint4 tile[9][32];
    const int lane = laneid();
    for (auto &rows : tile) rows[lane] = {};
    bar_warp_sync();
    const uint4 mine = registers[lane];
    const uint32_t four[4] = {mine.x, mine.y, mine.z, mine.w}, two[2] = {mine.x, mine.y};
    const auto address = [&](int form) { return static_cast<uint32_t>(__cvta_generic_to_shared(&tile[form][order[lane]])); };
    stmatrix_x1(address(0), mine.x);
    stmatrix_x2(address(1), two);
    stmatrix_x4(address(2), four);
    stmatrix_x2_trans(address(3), two);
    stmatrix_x4_trans(address(4), four);
    stmatrix_m16n8_x1_trans_b8(address(5), mine.x);
    stmatrix_m16n8_x2_trans_b8(address(6), two);
    stmatrix_m16n8_x4_trans_b8(address(7), four);
    stmatrix_x1(address(8), movmatrix_trans(mine.x));
    bar_warp_sync();
    for (int form = 0; form < 9; ++form) tiles[32 * form + lane] = tile[form][lane];
}

// Conversions of scales; four results to a pair of values.
extern "C" __global__ void scales(const float2 *values, uint4 *results, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const float2 pair = values[i];
    const float four[4] = {fabsf(pair.x), fabsf(pair.y), 0.0f, 1.0f};
    results[i] = {cvt_rp_satfinite_ue8m0x2_f32(pair.y, pair.x), cvt_rz_satfinite_ue8m0x2_f32(pair.y, pair.x),
                  cvt_rn_satfinite_ue4m3x4_f32(four), cvt_rn_bf16x2_ue8m0x2(__float_as_uint(pair.x) >> 16)};
}

// Scales from bytes 0 and 1 of each word, the four e4m3 codes of the word as f16, and its eight e2m1 codes.
extern "C" __global__ void from_codes(const uint32_t *words, uint32_t *ue4m3, uint2 *e4m3, uint4 *e2m1) {
    const int i = 32 * blockIdx.x + threadIdx.x;
    uint32_t pairs[2];
    cvt_rn_f16x2_e4m3x4(pairs, words[i]);
    e4m3[i] = {pairs[0], pairs[1]};
    ue4m3[i] = cvt_rn_f16x2_ue4m3x2(words[i]);
    uint32_t values[4];
    portable::f16x2_from_e2m1x8(words[i], values);
    e2m1[i] = {values[0], values[1], values[2], values[3]};
}

// 16 bytes for each thread by a copy of a run and by a predicated load; zeros behind `count`.
extern "C" __global__ void present_chunks(const uint4 *source, uint4 *copied, uint4 *loaded, int count) {
    __shared__ uint4 chunks[32];
    const int thread = of_this_branch(threadIdx.x);
    chunks[thread] = {1, 2, 3, 4};
    cp_async_cg_16_of_run(static_cast<uint32_t>(__cvta_generic_to_shared(chunks + thread)), source + thread,
                          thread < count);
    cp_async_commit_group();
    uint32_t words[4];
    ld_global_nc_16(words, source + thread, thread < count);
    cp_async_wait_group<0>();
    copied[thread] = chunks[thread];
    loaded[thread] = {words[0], words[1], words[2], words[3]};
}

// What lanes agree on: any, all, ballot, and how many were elected.
extern "C" __global__ void agreement(const int *says, uint32_t *results) {
    const int lane = laneid();
    const bool yes = says[32 * blockIdx.x + lane];
    const uint32_t elected = vote_sync_ballot(elect_sync());
    const uint4 mine = {vote_sync_any(yes), vote_sync_all(yes), vote_sync_ballot(yes), elected};
    reinterpret_cast<uint4 *>(results)[32 * blockIdx.x + lane] = mine;
}

// Copies runs of 1024 bytes through two buffers, by bulk copies where there are any.
extern "C" __global__ void copies(const uint4 *source, uint4 *target, int runs) {
    __shared__ alignas(16) uint4 buffers[2][64];
    __shared__ uint64_t full[2], empty[2];
    const auto address = [](const void *pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); };
    const int thread = threadIdx.x;
    if constexpr (has_bulk_copy) {
        if (thread == 0) {
            for (int i = 0; i < 2; ++i) {
                mbarrier_init(address(&full[i]), 1);
                mbarrier_init(address(&empty[i]), 64);
            }
            fence_mbarrier_init();
        }
        __syncthreads();   // the barriers are there
    }
    const auto start = [&](int run) {
        if constexpr (has_bulk_copy) {
            if (thread < 32 && elect_sync()) {
                mbarrier_arrive_expect_tx(address(&full[run % 2]), 1024);
                fence_proxy_async();
                cp_async_bulk_shared_global(address(buffers[run % 2]), source + 64 * run, 1024, address(&full[run % 2]));
            }
        } else {
            cp_async_cg_16(address(&buffers[run % 2][thread]), source + 64 * run + thread, true);
            cp_async_commit_group();
        }
    };
    start(0);
    for (int run = 0; run < runs; ++run) {
        if (run + 1 < runs) {
            if constexpr (has_bulk_copy) {
                if (run >= 1) mbarrier_wait_parity(address(&empty[(run + 1) % 2]), (run + 1) / 2 - 1 & 1);
            } else {
                __syncthreads();   // everybody has read the other buffer
            }
            start(run + 1);
        }
        if constexpr (has_bulk_copy) {
            mbarrier_wait_parity(address(&full[run % 2]), run / 2 & 1);
        } else {
            if (run + 1 < runs) cp_async_wait_group<1>();
            else cp_async_wait_group<0>();
            __syncthreads();   // the copies of all threads have landed
        }
        target[64 * run + thread] = buffers[run % 2][63 - thread];
        if constexpr (has_bulk_copy) mbarrier_arrive(address(&empty[run % 2]));
    }
    if constexpr (has_bulk_copy) {
        __syncthreads();   // nobody waits any more
        if (thread < 2) {
            mbarrier_inval(address(&full[thread]));
            mbarrier_inval(address(&empty[thread]));
        }
    }
}
