// probe_ldmatrix: which bytes ldmatrix loads into which registers, and where stmatrix stores them.
#include "kernel.cuh"
#include "op/probe_ldmatrix.cuh"

KERNEL(probe_ldmatrix, .threads = {32}, .shared_bytes = sizeof(op::MatrixRows), .tile = {32})
(int *m8n8,                    // [lanes, 4, 4]
 int *m8n8_trans,              // [lanes, 4, 4]
 int *m16n16_trans_b8,         // [lanes, 4, 4]
 int *m8n16_b4x16_p64,         // [lanes, 4, 4]
 int *stored_m8n8,             // [lanes, 16]
 int *stored_m8n8_trans,       // [lanes, 16]
 int *stored_m16n8_trans_b8,   // [lanes, 16]
 int lanes) {
    op::probe_ldmatrix(shared<op::MatrixRows>(), {m8n8, m8n8_trans, m16n16_trans_b8, m8n16_b4x16_p64, stored_m8n8,
                                                  stored_m8n8_trans, stored_m16n8_trans_b8});
}
