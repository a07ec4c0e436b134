// The entries of append_*: in 16 bits, and in a block format.
#pragma once

#include "append.cuh"

// The parameters of keys or values behind their slots and caches, in order, all of them null without them. Strides of
// null arrays are 0.
#define APPEND_ROWS(x)                                                                                                 \
    const __nv_bfloat16 *x##_bf16,                                          /* [tokens, heads, dim], or */             \
        const __half *x##_f16, const float *x##_f32, const float *x##_mean, /* [heads, dim] or null */                 \
        const float *x##_global                                             /* [heads] or null */
#define APPEND_AXES int tokens, long long count, int pages, int heads, int page, int dim, int dim_v
#define APPEND_STRIDES(x)                                                                                              \
    long long x##_bf16_token, long long x##_bf16_head, long long x##_f16_token, long long x##_f16_head,                \
        long long x##_f32_token, long long x##_f32_head
#define THE_APPENDED(x, dim)                                                                                           \
    {{x##_bf16, x##_bf16_token, x##_bf16_head},                                                                        \
     {x##_f16, x##_f16_token, x##_f16_head},                                                                           \
     {x##_f32, x##_f32_token, x##_f32_head},                                                                           \
     dim,                                                                                                              \
     x##_mean,                                                                                                         \
     x##_global}

#define APPEND_PLAIN(suffix, Element)                                                                                  \
    KERNEL(ENTRY(suffix), .threads = {op::append_threads}, .tile = {op::append_tokens}, .min_blocks = 8)               \
    (const long long *slots, /* [tokens] */                                                                            \
     int *claims,            /* [count] or null */                                                                     \
     Element *k_codes,       /* [pages, heads, page, dim] or null */                                                   \
     Element *v_codes,       /* [pages, heads, page, dim_v] or null */                                                 \
     APPEND_ROWS(k), APPEND_ROWS(v), int release, APPEND_AXES, STRIDES_PAGES(k_codes), STRIDES_PAGES(v_codes),         \
     APPEND_STRIDES(k), APPEND_STRIDES(v)) {                                                                           \
        op::append<op::PlainRow<Element>>(                                                                             \
            {THE_APPENDED(k, dim),                                                                                     \
             {reinterpret_cast<char *>(k_codes), nullptr, THE_STRIDES_PAGES(k_codes, 2), {}},                          \
             0},                                                                                                       \
            {THE_APPENDED(v, dim_v),                                                                                   \
             {reinterpret_cast<char *>(v_codes), nullptr, THE_STRIDES_PAGES(v_codes, 2), {}},                          \
             0},                                                                                                       \
            slots, claims, heads, page, tokens, count, release != 0);                                                  \
    }

#define APPEND_BLOCKS(Row)                                                                                             \
    KERNEL(ENTRY(), .threads = {op::append_threads}, .tile = {op::append_tokens}, .min_blocks = 5)                     \
    (const long long *slots, /* [tokens] */                                                                            \
     int *claims,            /* [count] or null */                                                                     \
     uint8_t *k_codes,       /* [pages, heads, page, dim * bits / 8] or null */                                        \
     uint8_t *v_codes,       /* [pages, heads, page, dim_v * bits / 8] or null */                                      \
     uint8_t *k_scales,      /* [pages, heads, page, dim / block] or null */                                           \
     uint8_t *v_scales,      /* [pages, heads, page, dim_v / block] or null */                                         \
     APPEND_ROWS(k), APPEND_ROWS(v), int k_rule, int v_rule, int release, APPEND_AXES, STRIDES_PAGES(k_codes),         \
     STRIDES_PAGES(v_codes), STRIDES_PAGES(k_scales), STRIDES_PAGES(v_scales), APPEND_STRIDES(k), APPEND_STRIDES(v)) { \
        const auto bytes = [](uint8_t *address) { return reinterpret_cast<char *>(address); };                         \
        op::append<Row>(                                                                                               \
            {THE_APPENDED(k, dim),                                                                                     \
             {bytes(k_codes), bytes(k_scales), THE_STRIDES_PAGES(k_codes, 1), THE_STRIDES_PAGES(k_scales, 1)},         \
             k_rule},                                                                                                  \
            {THE_APPENDED(v, dim_v),                                                                                   \
             {bytes(v_codes), bytes(v_scales), THE_STRIDES_PAGES(v_codes, 1), THE_STRIDES_PAGES(v_scales, 1)},         \
             v_rule},                                                                                                  \
            slots, claims, heads, page, tokens, count, release != 0);                                                  \
    }
