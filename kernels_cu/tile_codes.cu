// tile_codes: codes and scales of another quantizer as tiles that attention reads.
#include "kernel.cuh"
#include "op/tile_codes.cuh"

KERNEL(tile_codes, .threads = {op::tile_codes_threads}, .tile = {op::tile_codes_bytes})
(const uint8_t *codes,    // [batch, heads, code_rows, code_columns]
 const uint8_t *scales,   // [batch, heads, scale_rows, scale_columns] or null
 const int *sources,      // [tile_bytes]
 uint8_t *tiles,          // [batch, heads, count, tile_bytes]
 int code_step, int scale_step, int one, int batch, int heads, int code_rows, int code_columns, int scale_rows,
 int scale_columns, int tile_bytes, int count, long long codes_batch, long long codes_head, long long codes_row,
 long long scales_batch, long long scales_head, long long scales_row) {
    op::tile_codes({codes, codes_batch, codes_head, codes_row, code_rows, code_columns, code_step, 0},
                   {scales, scales_batch, scales_head, scales_row, scale_rows, scale_columns, scale_step,
                    static_cast<uint8_t>(one)},
                   sources, tiles, heads, count, tile_bytes);
}
