// unpack_rows: rows of packed sequences from tiles, where each sequence begins with a new tile.
#include "kernel.cuh"
#include "op/pack.cuh"

KERNEL(unpack_rows, .threads = {32 * op::unpack_warps}, .tile = {op::unpack_warps, 1})
(const uint32_t *x,       // [heads, rows, words]
 const int *key_starts,   // [sequences]
 uint32_t *y,             // [heads, keys, words]
 int heads, int rows, int words, int sequences, int keys) {
    op::unpack_rows(x, key_starts, y, rows, keys, words, sequences);
}
