// rope_rows: rows turned by the angles of their positions, into any type or block format.
#include "kernel.cuh"
#include "op/rope.cuh"

#define INSTANCE(suffix, Element)                                                                                      \
    KERNEL(rope_rows##suffix, .threads = {op::produce_threads}, .min_blocks = 2)                                       \
    (const Element *x,        /* [tokens, heads, cols] */                                                              \
     const float *table,      /* [length, width] */                                                                    \
     const int *positions,    /* [tokens] */                                                                           \
     const float *out_global, /* [level_count] or null */                                                              \
     PRODUCED_OUTPUTS, int first, int pairs, int inverse, int rounds, PRODUCED_SCALARS, int64_t tokens, int heads,     \
     int cols, int length, int width, int64_t level_count, int64_t code_bytes, int64_t scale_bytes, int64_t x_token,   \
     int64_t x_head, int64_t out_f32_row, int64_t out_f32_head, int64_t out_f16_row, int64_t out_f16_head,             \
     int64_t out_bf16_row, int64_t out_bf16_head) {                                                                    \
        const int64_t out_head = out_bf16 ? out_bf16_head : out_f16 ? out_f16_head : out_f32_head;                     \
        const op::Produced target = op::produced(                                                                      \
            {out_bf16, out_f16, out_f32, op::stride_of(out_bf16, out_f16, out_bf16_row, out_f16_row, out_f32_row)},    \
            codes, scales, code_bytes, out_global, ending, rule, swizzled, tokens * heads, cols);                      \
        op::rope_rows<Element>({x, x_token, x_head}, {table, length, width, first, pairs != 0, inverse != 0},          \
                               positions, rounds != 0, heads, out_head, target);                                       \
    }

INSTANCE(_f32, float)
INSTANCE(_f16, __half)
INSTANCE(_bf16, __nv_bfloat16)
