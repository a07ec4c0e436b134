// probe_fragments: where the functions of tile/ put elements and scales of fragments.
#include "kernel.cuh"
#include "op/probe_fragments.cuh"

KERNEL(probe_fragments, .threads = {32}, .shared_bytes = sizeof(op::FragmentTiles), .tile = {32})
(int *accumulator,    // [lanes, 4, 2]
 int *a,              // [lanes, 4, 4]
 int *b,              // [lanes, 2, 2, 4]
 int *b_transposed,   // [lanes, 2, 2, 4]
 int *scale_a,        // [lanes, 4]
 int *scale_b,        // [lanes, 4]
 int lanes) {
    op::probe_fragments(shared<op::FragmentTiles>(), {accumulator, a, b, b_transposed, scale_a, scale_b});
}
