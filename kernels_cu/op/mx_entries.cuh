// The entries of the MX quantizers and of their inverses, each for float32, float16 and bfloat16: a format's .cu names
// it.
#pragma once

#include "../kernel.cuh"
#include "quantize.cuh"
#include "quantize_columns.cuh"

#define MX_ENTRIES(ENTRY, name, Format)                                                                                \
    ENTRY(name##_f32, float, Format)                                                                                   \
    ENTRY(name##_f16, __half, Format)                                                                                  \
    ENTRY(name##_bf16, __nv_bfloat16, Format)

// Blocks of 32 along the last axis.
#define QUANTIZE_MX(name, Format) MX_ENTRIES(QUANTIZE_MX_ENTRY, name, Format)
#define QUANTIZE_MX_ENTRY(entry, Element, Format)                                                                      \
    KERNEL(entry, .threads = {op::quantize_threads}, .tile = {op::quantize_tile<Element>},                             \
           .min_blocks = op::quantize_blocks<Format, Element>)                                                         \
    (const Element *x, /* [rows, cols] */                                                                              \
     uint32_t *codes,  /* [rows, cols * bits / 8] bytes */                                                             \
     uint8_t *scales,  /* [rows, cols / 32], or in tiles */                                                            \
     int rule, int swizzled, int64_t rows, int64_t cols, int64_t scale_rows, int64_t scale_cols) {                     \
        op::with_scales(scales, swizzled, scale_rows * scale_cols, rows, cols / 32, [&](const auto &target) {          \
            op::quantize_mx<Format>(x, codes, target, rows * cols, tile::ScaleRule(rule));                             \
        });                                                                                                            \
    }

#define DEQUANTIZE_MX(name, Format) MX_ENTRIES(DEQUANTIZE_MX_ENTRY, name, Format)
#define DEQUANTIZE_MX_ENTRY(entry, Element, Format)                                                                    \
    KERNEL(entry, .threads = {op::quantize_threads}, .tile = {op::quantize_tile<Element>})                             \
    (const uint32_t *codes, /* [rows, cols * bits / 8] bytes */                                                        \
     const uint8_t *scales, /* [rows, cols / 32] */                                                                    \
     Element *x,            /* [rows, cols] */                                                                         \
     int64_t rows, int64_t cols) {                                                                                     \
        op::dequantize_mx<Format>(codes, scales, x, rows * cols);                                                      \
    }

// Blocks of 32 down the columns of `outer` matrices.
#define QUANTIZE_MX_COLUMNS(name, Format) MX_ENTRIES(QUANTIZE_MX_COLUMNS_ENTRY, name, Format)
#define QUANTIZE_MX_COLUMNS_ENTRY(entry, Element, Format)                                                              \
    KERNEL(entry, .threads = {op::columns_threads}, .tile = {op::columns_tile, op::columns_warps * tile::mx_block, 1}, \
           .min_blocks = op::quantize_mx_columns_blocks<Format, Element>)                                              \
    (const Element *x, /* [outer, rows, cols] */                                                                       \
     uint8_t *codes,   /* [outer, rows * bits / 8, cols] */                                                            \
     uint8_t *scales,  /* [outer, rows / 32, cols], or in tiles */                                                     \
     int rule, int swizzled, int64_t outer, int64_t rows, int64_t cols, int64_t scale_outer, int64_t scale_rows,       \
     int64_t scale_cols) {                                                                                             \
        const op::ColumnScales target{                                                                                 \
            scales, swizzled != 0, {scale_outer, scale_rows, scale_cols}, outer, rows, cols};                          \
        op::with_columns(cols, [&](auto whole) {                                                                       \
            op::quantize_mx_columns<Format, whole>(x, codes, target, tile::ScaleRule(rule));                           \
        });                                                                                                            \
    }

#define DEQUANTIZE_MX_COLUMNS(name, Format) MX_ENTRIES(DEQUANTIZE_MX_COLUMNS_ENTRY, name, Format)
#define DEQUANTIZE_MX_COLUMNS_ENTRY(entry, Element, Format)                                                            \
    KERNEL(entry, .threads = {op::columns_threads}, .tile = {op::columns_tile, op::columns_warps * tile::mx_block, 1}, \
           .min_blocks = op::dequantize_columns_blocks<Element>)                                                       \
    (const uint8_t *codes,  /* [outer, rows * bits / 8, cols] */                                                       \
     const uint8_t *scales, /* [outer, rows / 32, cols] */                                                             \
     Element *x,            /* [outer, rows, cols] */                                                                  \
     int64_t outer, int64_t rows, int64_t cols) {                                                                      \
        const int64_t values = int64_t(blockIdx.z) * rows * cols; /* before this matrix */                             \
        op::with_columns(cols, [&](auto whole) {                                                                       \
            op::dequantize_mx_columns<Format, whole>(codes + values * Format::bits / 8, scales + values / 32,          \
                                                     x + values, rows, cols);                                          \
        });                                                                                                            \
    }
