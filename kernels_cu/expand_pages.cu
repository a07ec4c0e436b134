// expand_pages: the rows of sequences from pages, expanded to 16 bits and consecutive.
#include "kernel.cuh"
#include "op/expand.cuh"

#define INSTANCE(suffix, Element)                                                                                      \
    KERNEL(expand_pages##suffix, .threads = {op::expand_threads}, .tile = {tile::tile_keys})                           \
    (const uint8_t *codes,   /* [pages, heads, page, width] */                                                         \
     const uint8_t *scales,  /* [pages, heads, page, blocks] or null */                                                \
     const int *block_table, /* [sequences, table] */                                                                  \
     const int *key_ends,    /* [sequences] */                                                                         \
     Element *out,           /* [heads, sequences, keys, dim] */                                                       \
     int *starts, int *ends, /* [sequences] or null */                                                                 \
     uint32_t *cleared,      /* [heads, sequences] or null */                                                          \
     uint32_t *marks,        /* [heads, sequences] or null */                                                          \
     int holds, int pages, int heads, int page, int width, int blocks, int sequences, int table, int keys, int dim,    \
     long long codes_page, long long codes_head, long long codes_token, long long scales_page, long long scales_head,  \
     long long scales_token, long long block_table_sequence) {                                                         \
        op::expand_pages(tile::RowFormat(holds),                                                                       \
                         {codes,                                                                                       \
                          {codes_page, codes_head, codes_token},                                                       \
                          scales,                                                                                      \
                          {scales_page, scales_head, scales_token},                                                    \
                          int(blockIdx.z),                                                                             \
                          width,                                                                                       \
                          blocks},                                                                                     \
                         {block_table + blockIdx.y * block_table_sequence, page, 1}, key_ends, out, starts, ends,      \
                         cleared, marks, sequences, keys, dim);                                                        \
    }

INSTANCE(_bf16, __nv_bfloat16)
INSTANCE(_f16, __half)
