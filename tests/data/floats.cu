// Float arithmetic in every precision and rounding, one result per slot.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

extern "C" __global__ void singles(float *out, const float *in, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float a = in[3 * i], b = in[3 * i + 1], c = in[3 * i + 2];
    float *o = out + 24 * i;
    o[0] = __fadd_rn(a, b);
    o[1] = __fadd_rz(a, b);
    o[2] = __fadd_ru(a, b);
    o[3] = __fadd_rd(a, b);
    o[4] = __fmul_rn(a, b);
    o[5] = __fmul_rz(a, b);
    o[6] = __fmul_ru(a, b);
    o[7] = __fmul_rd(a, b);
    o[8] = __fmaf_rn(a, b, c);
    o[9] = __fmaf_rz(a, b, c);
    o[10] = __fmaf_ru(a, b, c);
    o[11] = __fmaf_rd(a, b, c);
    o[12] = __fdiv_rn(a, b);
    o[13] = __fdiv_rz(a, b);
    o[14] = __fdiv_ru(a, b);
    o[15] = __fdiv_rd(a, b);
    o[16] = __fsqrt_rn(fabsf(a));
    o[17] = __fsqrt_ru(fabsf(a));
    o[18] = __frcp_rn(a);
    o[19] = __frcp_rd(a);
    o[20] = fminf(a, b);
    o[21] = fmaxf(b, c);
    o[22] = __saturatef(a);
    o[23] = copysignf(a, b);
}

extern "C" __global__ void doubles(double *out, const double *in, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const double a = in[3 * i], b = in[3 * i + 1], c = in[3 * i + 2];
    double *o = out + 10 * i;
    o[0] = a + b;
    o[1] = a * b;
    o[2] = fma(a, b, c);
    o[3] = a / b;
    o[4] = sqrt(fabs(a));
    o[5] = exp(a * 1e-3);
    o[6] = __dadd_ru(a, b);
    o[7] = __dmul_rd(a, b);
    o[8] = fmin(a, c);
    o[9] = (double)(long long)a + (float)b;
}

extern "C" __global__ void halves(__half2 *out, __nv_bfloat162 *out_b, const __half2 *in, const __nv_bfloat162 *in_b, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const __half2 a = in[3 * i], b = in[3 * i + 1], c = in[3 * i + 2];
    const __nv_bfloat162 x = in_b[3 * i], y = in_b[3 * i + 1], z = in_b[3 * i + 2];
    __half2 *o = out + 8 * i;
    __nv_bfloat162 *p = out_b + 8 * i;
    o[0] = __hadd2_rn(a, b);
    o[1] = __hmul2_rn(a, b);
    o[2] = __hfma2(a, b, c);
    o[3] = __hmin2(a, b);
    o[4] = __hmax2(b, c);
    o[5] = __hneg2(__habs2(a));
    o[6] = __hsub2_rn(a, c);
    o[7] = __hfma2_relu(a, b, c);
    p[0] = __hadd2_rn(x, y);
    p[1] = __hmul2_rn(x, y);
    p[2] = __hfma2(x, y, z);
    p[3] = __hmin2(x, y);
    p[4] = __hmax2(y, z);
    p[5] = __hneg2(__habs2(x));
    p[6] = __hsub2_rn(x, z);
    p[7] = __hfma2_relu(x, y, z);
}
