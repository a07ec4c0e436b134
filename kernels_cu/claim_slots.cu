// claim_slots: the first token of every slot.
#include "kernel.cuh"
#include "op/append.cuh"

KERNEL(claim_slots, .threads = {op::claim_threads}, .tile = {op::claim_threads})
(const long long *slots,   // [tokens]
 int *claims,              // [slots]
 int tokens, long long count) {
    op::claim_slots(slots, claims, tokens, count);
}
