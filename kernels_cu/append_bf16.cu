// append_bf16: rows of tokens to their slots in pages, in bf16 or f16.
#include "kernel.cuh"
#include "op/append.cuh"

#define INSTANCE(suffix, Element)                                                                                            \
    KERNEL(append_bf16##suffix, .threads = {op::append_threads})                                                             \
    (const long long *slots,        /* [tokens] */                                                                           \
     int *claims,                   /* [count] */                                                                            \
     Element *codes,                /* [pages, heads, page, dim] */                                                          \
     const __nv_bfloat16 *x_bf16,   /* [tokens, heads, dim] or null, as all that follow */                                   \
     const __half *x_f16, const float *x_f32,                                                                                \
     const float *mean,             /* [heads, dim] */                                                                       \
     const float *global_scale,     /* [heads] */                                                                            \
     int release, int tokens, long long count, int pages, int heads, int page, int dim, long long codes_page,                \
     long long codes_head, long long codes_token, long long x_bf16_token, long long x_bf16_head, long long x_f16_token,      \
     long long x_f16_head, long long x_f32_token, long long x_f32_head) {                                                    \
        op::append<op::PlainRow<Element>>(                                                                                   \
            {x_bf16, x_f16, x_f32, x_bf16_token + x_f16_token + x_f32_token, /* those of arrays that are not there are 0 */  \
             x_bf16_head + x_f16_head + x_f32_head, heads, dim, mean, global_scale},                                         \
            slots, claims,                                                                                                   \
            {reinterpret_cast<char *>(codes), nullptr, {2 * codes_page, 2 * codes_head, 2 * codes_token}, {}, page}, count,  \
            0, release != 0);                                                                                                \
    }

INSTANCE(_bf16, __nv_bfloat16)
INSTANCE(_f16, __half)
