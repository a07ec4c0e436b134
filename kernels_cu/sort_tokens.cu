// sort_tokens: tokens sorted by expert.
#include "kernel.cuh"
#include "op/route.cuh"

KERNEL(sort_tokens, .threads = {op::route_threads}, .shared_bytes = sizeof(op::RouteShared))
(const int *expert_ids,   // [tokens, chosen]
 int *order,              // [tokens * chosen]
 int *starts,             // [blocks]: experts + 1
 int *places,             // [tokens, chosen]
 int tokens, int chosen, int blocks) {
    op::route(shared<op::RouteShared>(), expert_ids, order, starts, places, tokens * chosen, chosen, blocks - 1);
}
