// norm_rows: rows normed by their root mean square or their standard deviation, into any type or block format.
#include "kernel.cuh"
#include "op/early.cuh"
#include "op/norm.cuh"

// Two blocks on a multiprocessor leave the registers for a row and its weights.
#define INSTANCE(suffix, Element)                                                                                      \
    KERNEL(norm_rows##suffix, .threads = {op::produce_threads}, .shared_bytes = sizeof(op::NormHeldShared),            \
           .min_blocks = 2)                                                                                            \
    (const Element *x,                                                                    /* [rows, cols] */           \
     const Element *residual,                                                             /* [rows, cols] or null */   \
     const float *weight_f32, const __half *weight_f16, const __nv_bfloat16 *weight_bf16, /* [cols] or null */         \
     const float *bias_f32, const __half *bias_f16, const __nv_bfloat16 *bias_bf16,       /* the same */               \
     const float *out_global,                                                             /* [level_count] or null */  \
     Element *total,                                                                      /* [rows, cols] or null */   \
     PRODUCED_OUTPUTS, float eps, float offset, int centered, int rounds, PRODUCED_SCALARS, int64_t rows, int cols,    \
     int64_t level_count, int64_t code_bytes, int64_t scale_bytes, int64_t x_row, int64_t residual_row,                \
     int64_t total_row, PRODUCED_STRIDES) {                                                                            \
        op::let_next_begin();                                                                                          \
        const op::OutputRows out = {out_bf16, out_f16, out_f32,                                                        \
                                    op::stride_of(out_bf16, out_f16, out_bf16_row, out_f16_row, out_f32_row)};         \
        op::norm_rows<Element>(shared<op::NormHeldShared>(), {x, residual, total, x_row, residual_row, total_row},     \
                               {{weight_bf16, weight_f16, weight_f32, 0},                                              \
                                {bias_bf16, bias_f16, bias_f32, 0},                                                    \
                                eps,                                                                                   \
                                offset,                                                                                \
                                centered != 0,                                                                         \
                                rounds != 0},                                                                          \
                               out, rows, cols, [&] {                                                                  \
                                   return op::produced(out, codes, scales, code_bytes, out_global, ending, rule,       \
                                                       swizzled, rows, cols);                                          \
                               });                                                                                     \
    }

INSTANCE(_f32, float)
INSTANCE(_f16, __half)
INSTANCE(_bf16, __nv_bfloat16)
