// The entries of append_*: in 16 bits, and in a block format.
#pragma once

#include "append.cuh"

// The parameters behind the arrays of the cache, in order. Strides of null arrays are 0.
#define APPEND_ROWS                                                                                                    \
    const __nv_bfloat16 *x_bf16, /* [tokens, heads, dim] or null, as all that follow */                                \
        const __half *x_f16, const float *x_f32, const float *mean, /* [heads, dim] */                                 \
        const float *global_scale                                   /* [heads] */
#define APPEND_AXES int tokens, long long count, int pages, int heads, int page, int dim
#define APPEND_STRIDES                                                                                                 \
    long long x_bf16_token, long long x_bf16_head, long long x_f16_token, long long x_f16_head, long long x_f32_token, \
        long long x_f32_head

#define APPEND_PLAIN(suffix, Element)                                                                                  \
    KERNEL(ENTRY(suffix), .threads = {op::append_threads}, .shared_bytes = sizeof(op::AppendShared),                   \
           .tile = {op::append_tokens})                                                                                \
    (const long long *slots, /* [tokens] */                                                                            \
     int *claims,            /* [count] */                                                                             \
     Element *codes,         /* [pages, heads, page, dim] */                                                           \
     APPEND_ROWS, int release, APPEND_AXES, STRIDES_PAGES(codes), APPEND_STRIDES) {                                    \
        op::append<op::PlainRow<Element>>(                                                                             \
            shared<op::AppendShared>(),                                                                                \
            {x_bf16, x_f16, x_f32, x_bf16_token + x_f16_token + x_f32_token, x_bf16_head + x_f16_head + x_f32_head,    \
             heads, dim, mean, global_scale},                                                                          \
            slots, claims, {reinterpret_cast<char *>(codes), nullptr, THE_STRIDES_PAGES(codes, 2), {}, page}, tokens,  \
            count, 0, release != 0);                                                                                   \
    }

#define APPEND_BLOCKS(Row)                                                                                             \
    KERNEL(ENTRY(), .threads = {op::append_threads}, .shared_bytes = sizeof(op::AppendShared),                         \
           .tile = {op::append_tokens}, .min_blocks = 5)                                                               \
    (const long long *slots, /* [tokens] */                                                                            \
     int *claims,            /* [count] */                                                                             \
     uint8_t *codes,         /* [pages, heads, page, dim * bits / 8] */                                                \
     uint8_t *scales,        /* [pages, heads, page, dim / block] */                                                   \
     APPEND_ROWS, int rule, int release, APPEND_AXES, STRIDES_PAGES(codes), STRIDES_PAGES(scales), APPEND_STRIDES) {   \
        op::append<Row>(shared<op::AppendShared>(),                                                                    \
                        {x_bf16, x_f16, x_f32, x_bf16_token + x_f16_token + x_f32_token,                               \
                         x_bf16_head + x_f16_head + x_f32_head, heads, dim, mean, global_scale},                       \
                        slots, claims,                                                                                 \
                        {reinterpret_cast<char *>(codes), reinterpret_cast<char *>(scales),                            \
                         THE_STRIDES_PAGES(codes, 1), THE_STRIDES_PAGES(scales, 1), page},                             \
                        tokens, count, rule, release != 0);                                                            \
    }
