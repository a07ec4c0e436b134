// find_slots: the slots of tokens in the pages of their sequences.
#include "kernel.cuh"
#include "op/pages.cuh"

KERNEL(find_slots, .threads = {op::slot_threads}, .tile = {op::slot_threads})
(const int *block_table,    // [sequences, table]
 const int *sequence_ids,   // [tokens]
 const int *positions,      // [tokens]
 long long *slots,          // [tokens]
 int page, int sequences, int table, int tokens, long long block_table_sequence) {
    op::find_slots(block_table, block_table_sequence, sequence_ids, positions, slots, sequences, table, tokens, page);
}
