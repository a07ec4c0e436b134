// thread_identity: each thread writes its identity registers: the first test of any machine.
#include "kernel.cuh"
#include "op/identity.cuh"

KERNEL(thread_identity, .threads = {8, 4, 3}, .tile = {1, 1, 1})
(int *identity,   // [blocks_z, blocks_y, blocks_x, threads, 16]
 int blocks_z, int blocks_y, int blocks_x, int threads) {
    op::thread_identity(identity, blocks_x, blocks_y);
}
