// Integer operations, one result per slot, on pairs of 32-bit and 64-bit words.
#include <cstdint>

extern "C" __global__ void integers(uint32_t *out, uint64_t *wide, const uint32_t *in, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const uint32_t a = in[2 * i], b = in[2 * i + 1];
    const int32_t s = (int32_t)a, t = (int32_t)b;
    const uint64_t x = ((uint64_t)a << 32 | b) * 0x9E3779B97F4A7C15ull, y = (uint64_t)b << 32 | a;
    const int64_t u = (int64_t)x, v = (int64_t)(y >> (b & 31)) - 1000;
    uint32_t *o = out + 32 * (size_t)i;
    uint64_t *w = wide + 12 * (size_t)i;
    o[0] = __umulhi(a, b);
    o[1] = (uint32_t)__mulhi(s, t);
    o[2] = __brev(a);
    o[3] = __clz(s);
    o[4] = __popc(a);
    o[5] = __ffs(s);
    o[6] = __funnelshift_l(a, b, b >> 3);
    o[7] = __funnelshift_rc(a, b, b >> 5);
    o[8] = __byte_perm(a, b, 0x5140);
    o[9] = __byte_perm(a, b, b & 0x7777);
    o[10] = a / (b | 1);
    o[11] = a % (b | 1);
    o[12] = (uint32_t)(s / (t | 1));
    o[13] = (uint32_t)(s % (t | 1));
    o[14] = __dp4a(s, t, 17);
    o[15] = __sad(s, t, 5u);
    o[16] = (uint32_t)(s >> (b & 31));
    o[17] = a >> (b & 31);
    o[18] = min(s, t) + max(a, b);
    o[19] = (uint32_t)abs(s >> 3);
    o[20] = (a & b) ^ (a | ~b);
    o[21] = s < t ? a : b;
    o[22] = (uint16_t)a * (uint16_t)b;
    o[23] = (uint32_t)(int32_t)(int8_t)a + (uint32_t)(int16_t)b;
    o[24] = a / 7 + b % 10;
    o[25] = (uint32_t)__float_as_int((float)s);
    o[26] = (uint32_t)(int)(__int_as_float((b & 0x007fffff) | 0x4a000000));
    o[27] = __vadd4(a, b);
    o[28] = __vmaxu4(a, b);
    o[29] = __uhadd(a, b);
    o[30] = __hadd(s, t);
    o[31] = (a >> 5) & 0x3ff;
    w[0] = x / (y | 1);
    w[1] = x % (y | 1);
    w[2] = (uint64_t)(u / (v | 1));
    w[3] = (uint64_t)(u % (v | 1));
    w[4] = __umul64hi(x, y);
    w[5] = (uint64_t)__mul64hi(u, v);
    w[6] = (uint64_t)(u >> (b & 63));
    w[7] = x << (a & 63);
    w[8] = (uint64_t)__clzll(u) + 100 * __popcll(x) + 10000 * __ffsll(u);
    unsigned __int128 product = (unsigned __int128)x * y + x;
    w[9] = (uint64_t)(product >> 64);
    w[10] = (uint64_t)(product >> 13);
    w[11] = __brevll(x) + (u < v ? 1 : 0);
}
