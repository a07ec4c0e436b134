// Copies of rows of pages, and the slots of tokens.
#pragma once

#include <cstdint>

#include "../kernel.cuh"
#include "paged.cuh"

namespace op {

constexpr int page_threads = 128, slot_threads = 128;

// Copies a row of `width` bytes with `threads` threads, of which this is number `thread`: 16 bytes at a time if both
// addresses and the width are multiples of 16.
__device__ inline void move_row(const uint8_t *from, uint8_t *to, int width, int thread, int threads) {
    if ((reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to) | width) % 16 == 0) {
        for (int i = thread; i < width / 16; i += threads)
            reinterpret_cast<uint4 *>(to)[i] = reinterpret_cast<const uint4 *>(from)[i];
    } else {
        for (int i = thread; i < width; i += threads) to[i] = from[i];
    }
}

constexpr int row_threads = 8;   // that copy one row

// rows[targets[i]] = rows[sources[i]] for pages [heads, page, width] of rows; block i copies the first counts[i] rows
// of its page, or all if counts is null.
__device__ inline void copy_rows(const int *sources, const int *targets, const int *counts, uint8_t *rows,
                                 const PageStrides &strides, int heads, int page, int width) {
    const long long from = sources[blockIdx.x] * strides.page, to = targets[blockIdx.x] * strides.page;
    for (int i = threadIdx.x / row_threads; i < heads * page; i += page_threads / row_threads) {
        if (counts && i % page >= counts[blockIdx.x]) continue;
        const long long at = i / page * strides.head + i % page * strides.token;
        move_row(rows + from + at, rows + to + at, width, threadIdx.x % row_threads, row_threads);
    }
}

// out[sequences][heads][keys][width]: the rows of sequences, consecutive; zeros from key_ends on.
__device__ inline void unpack_pages(const uint8_t *rows, const PageStrides &strides, const PageTable &table,
                                    int first_row, int table_stride, const int *key_ends, uint8_t *out, int sequences,
                                    int heads, int keys, int width) {
    for (int i = threadIdx.x / row_threads; i < page_threads / row_threads; i += page_threads / row_threads) {
        const int at = first_row + i;
        if (at >= sequences * keys) return;
        const int sequence = at / keys, key = at % keys, head = blockIdx.y, thread = threadIdx.x % row_threads;
        uint8_t *target = out + ((size_t(sequence) * heads + head) * keys + key) * width;
        if (key < key_ends[sequence]) {
            const PageTable of{table.pages + sequence * static_cast<long long>(table_stride), table.page, 1};
            const PageTable::Place place = of.place(key);
            move_row(rows + place.page * strides.page + head * strides.head + place.row * strides.token, target, width,
                     thread, row_threads);
        } else {
            for (int byte = thread; byte < width; byte += row_threads) target[byte] = 0;
        }
    }
}

// slots[token] = the slot of position positions[token] of sequence sequence_ids[token], by block_table[sequences,
// table]; -1 if there is none.
__device__ inline void find_slots(const int *block_table, long long stride, const int *sequence_ids,
                                  const int *positions, long long *slots, int sequences, int table, int tokens,
                                  int page) {
    const int token = blockIdx.x * slot_threads + threadIdx.x;
    if (token >= tokens) return;
    const int sequence = sequence_ids[token], position = positions[token];
    long long slot = -1;
    if (sequence >= 0 && sequence < sequences && position >= 0 && position / page < table) {
        const int number = block_table[sequence * stride + position / page];
        if (number >= 0) slot = static_cast<long long>(number) * page + position % page;
    }
    slots[token] = slot;
}

}   // namespace op
