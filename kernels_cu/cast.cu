// cast: rows in another type of float, cut or padded with zeros to another width.
#include "kernel.cuh"
#include "op/cast.cuh"

#define STRIDES(name) int64_t name##_batch, int64_t name##_head, int64_t name##_row, int64_t name##_column
#define STRIDED(name, data) {data, name##_batch, name##_head, name##_row, name##_column}

#define INSTANCE(suffix, Element)                                                                                      \
    KERNEL(cast##suffix, .threads = {op::cast_threads}, .tile = {op::cast_tile, 1, 1})                                 \
    (const Element *x,      /* [batch, heads, rows, cols] */                                                           \
     float *y_f32,          /* [batch, heads, rows, width] or null */                                                  \
     __half *y_f16,         /* the same */                                                                             \
     __nv_bfloat16 *y_bf16, /* the same */                                                                             \
     int batch, int heads, int64_t rows, int64_t cols, int64_t width, STRIDES(x), STRIDES(y_f32), STRIDES(y_f16),      \
     STRIDES(y_bf16)) {                                                                                                \
        const op::Strided<const Element> source STRIDED(x, x);                                                         \
        op::cast_to<Element, float>(source, STRIDED(y_f32, y_f32), rows, cols, width);                                 \
        op::cast_to<Element, __half>(source, STRIDED(y_f16, y_f16), rows, cols, width);                                \
        op::cast_to<Element, __nv_bfloat16>(source, STRIDED(y_bf16, y_bf16), rows, cols, width);                       \
    }

INSTANCE(_f32, float)
INSTANCE(_f16, __half)
INSTANCE(_bf16, __nv_bfloat16)
