// append_nvfp4: rows of tokens to their slots in pages, in NVFP4.
#include "kernel.cuh"
#include "op/append.cuh"

KERNEL(append_nvfp4, .threads = {op::append_threads})
(const long long *slots,        // [tokens]
 int *claims,                   // [count]
 uint8_t *codes,                // [pages, heads, page, dim * bits / 8]
 uint8_t *scales,               // [pages, heads, page, dim / block]
 const __nv_bfloat16 *x_bf16,   // [tokens, heads, dim] or null, as all that follow
 const __half *x_f16, const float *x_f32,
 const float *mean,             // [heads, dim]
 const float *global_scale,     // [heads]
 int rule, int release, int tokens, long long count, int pages, int heads, int page, int dim,
 long long codes_page, long long codes_head, long long codes_token, long long scales_page, long long scales_head,
 long long scales_token, long long x_bf16_token, long long x_bf16_head, long long x_f16_token, long long x_f16_head,
 long long x_f32_token, long long x_f32_head) {
    op::append<op::Nvfp4Row>({x_bf16, x_f16, x_f32, x_bf16_token + x_f16_token + x_f32_token,   // those of arrays that are not there are 0
                    x_bf16_head + x_f16_head + x_f32_head, heads, dim, mean, global_scale},
                   slots, claims,
                   {reinterpret_cast<char *>(codes), reinterpret_cast<char *>(scales), {codes_page, codes_head, codes_token},
                    {scales_page, scales_head, scales_token}, page},
                   count, rule, release != 0);
}
