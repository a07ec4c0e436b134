// append_qkv: norms and rotates queries and keys of a projection, and writes keys and values to the pages of a cache.
#include "kernel.cuh"
#include "op/append_qkv.cuh"
#include "op/early.cuh"

// With 16-bit elements append_any() spills nine words that its loop uses once per row.
#define INSTANCE(suffix, Element, spilled)                                                                             \
    KERNEL(append_qkv##suffix, .threads = {op::produce_threads}, .shared_bytes = sizeof(op::NormRowsShared),           \
           .min_blocks = 2, .spill_bytes = spilled)                                                                    \
    (const Element *q,                     /* [tokens, heads, dim] */                                                  \
     const Element *k,                     /* [tokens, heads_kv, dim] */                                               \
     const Element *v,                     /* [tokens, heads_kv, dim_v] */                                             \
     const float *table,                   /* [length, width] */                                                       \
     const int *positions,                 /* [tokens] */                                                              \
     const long long *slots,               /* [tokens] */                                                              \
     int *claims,                          /* [count] or null */                                                       \
     const float *q_weight,                /* [dim] or null, as all that follow */                                     \
     const float *k_weight,                /* [dim] */                                                                 \
     const float *k_mean,                  /* [heads_kv, dim] */                                                       \
     const float *k_global,                /* [heads_kv] */                                                            \
     const float *v_global,                /* [heads_kv] */                                                            \
     const float *out_global,              /* [level_count] */                                                         \
     uint8_t *k_codes, uint8_t *v_codes,   /* [pages, heads_kv, page, bytes] */                                        \
     uint8_t *k_scales, uint8_t *v_scales, /* [pages, heads_kv, page, blocks] */                                       \
     Element *out,                         /* [tokens, heads, dim], or */                                              \
     uint8_t *codes,                       /* [tokens heads, code_bytes] */                                            \
     uint8_t *scales,                      /* [tokens heads, blocks] */                                                \
     int first, int pairs, float eps, int holds, int k_rule, int v_rule, int ending, int rule, int64_t tokens,         \
     int heads, int dim, int heads_kv, int dim_v, int length, int width, int64_t count, int64_t level_count,           \
     int64_t pages, int page, int64_t k_bytes, int64_t v_bytes, int64_t k_blocks, int64_t v_blocks,                    \
     int64_t code_bytes, int64_t blocks, int64_t q_token, int64_t q_head, int64_t k_token, int64_t k_head,             \
     int64_t v_token, int64_t v_head, int64_t k_codes_page, int64_t k_codes_head, int64_t k_codes_token,               \
     int64_t v_codes_page, int64_t v_codes_head, int64_t v_codes_token, int64_t k_scales_page, int64_t k_scales_head,  \
     int64_t k_scales_token, int64_t v_scales_page, int64_t v_scales_head, int64_t v_scales_token) {                   \
        op::let_next_begin();                                                                                          \
        op::wait_for_launches_ahead(out_global);                                                                       \
        const auto bytes = [](uint8_t *address) { return reinterpret_cast<char *>(address); };                         \
        const op::QuantizedRows quantized = {                                                                          \
            op::EndingFormat(ending),       codes, scales, code_bytes, {blocks, blocks, false}, rule,                  \
            out_global ? *out_global : 1.0f};                                                                          \
        op::append_qkv<Element>(                                                                                       \
            shared<op::NormRowsShared>(),                                                                              \
            {{{q, q_token, q_head}, {k, k_token, k_head}, {v, v_token, v_head}, tokens, heads, heads_kv, dim, dim_v},  \
             {q_weight, k_weight, eps},                                                                                \
             {table, length, width, first, pairs != 0, false},                                                         \
             positions,                                                                                                \
             {out, quantized},                                                                                         \
             slots,                                                                                                    \
             claims,                                                                                                   \
             count,                                                                                                    \
             page,                                                                                                     \
             op::CacheFormat(holds),                                                                                   \
             {{bytes(k_codes),                                                                                         \
               bytes(k_scales),                                                                                        \
               {k_codes_page, k_codes_head, k_codes_token},                                                            \
               {k_scales_page, k_scales_head, k_scales_token}},                                                        \
              k_mean,                                                                                                  \
              k_global,                                                                                                \
              k_rule},                                                                                                 \
             {{bytes(v_codes),                                                                                         \
               bytes(v_scales),                                                                                        \
               {v_codes_page, v_codes_head, v_codes_token},                                                            \
               {v_scales_page, v_scales_head, v_scales_token}},                                                        \
              nullptr,                                                                                                 \
              v_global,                                                                                                \
              v_rule},                                                                                                 \
             0,                                                                                                        \
             0});                                                                                                      \
    }

INSTANCE(_f32, float, 0)
INSTANCE(_f16, __half, 64)
INSTANCE(_bf16, __nv_bfloat16, 64)
