// copy_rows: pages copied within their array.
#include "kernel.cuh"
#include "op/pages.cuh"

KERNEL(copy_rows, .threads = {op::page_threads})
(const int *sources, const int *targets,   // [count]
 const int *counts,                        // [count] or null
 uint8_t *rows,                            // [pages, heads, page, width]
 int count, int pages, int heads, int page, int width, long long rows_page, long long rows_head, long long rows_token) {
    op::copy_rows(sources, targets, counts, rows, {rows_page, rows_head, rows_token}, heads, page, width);
}
