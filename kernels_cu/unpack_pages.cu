// unpack_pages: the rows of sequences from pages, consecutive.
#include "kernel.cuh"
#include "op/pages.cuh"

KERNEL(unpack_pages, .threads = {op::page_threads}, .tile = {op::page_threads / op::row_threads})
(const uint8_t *rows,      // [pages, heads, page, width]
 const int *block_table,   // [sequences, table]
 const int *key_ends,      // [sequences]
 uint8_t *out,             // [sequences, heads, keys, width]
 int pages, int heads, int page, int width, int sequences, int table, int keys, long long rows_page,
 long long rows_head, long long rows_token, long long block_table_sequence) {
    op::unpack_pages(rows, {rows_page, rows_head, rows_token}, {block_table, page, 1},
                     blockIdx.x * (op::page_threads / op::row_threads), block_table_sequence, key_ends, out, sequences,
                     heads, keys, width);
}
