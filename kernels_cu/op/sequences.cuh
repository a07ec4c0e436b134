// Packed sequences, one after the other, cut into units (tiles, runs) that no two of them share.
#pragma once

namespace op {

// Sequence i has units of its own from number floor(start / size) + i on. None overlap, whatever the lengths, since
// floor(start / size) + ceil(length / size) <= floor((start + length) / size) + 1. So no prefix sum of lengths is
// needed. All of `sequences` with `total` elements have ceil(total / size) + sequences - 1 units; some may belong to
// none.
__device__ inline int first_unit(int start, int sequence, int size) { return start / size + sequence; }

// The last of `count` sequences with first(sequence) <= place, where `first` never decreases; 0 if there is none.
template <class First>
__device__ inline int last_sequence(int count, int place, First &&first) {
    int low = 0, high = count;   // sequences up to `low` begin at or before `place`, from `high` on behind it
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (first(middle) <= place) low = middle;
        else high = middle;
    }
    return low;
}

// The sequence of an element. If several begin with it, the last one: the others are empty.
__device__ inline int sequence_of(const int *starts, int count, int element) {
    return last_sequence(count, element, [&](int i) { return __ldg(starts + i); });
}

}   // namespace op
