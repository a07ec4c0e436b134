// Infinities and NaN of values in pages, for the outputs of many queries: attention multiplied zeros in their place,
// since the product of a hidden key's weight 0 with them would be NaN.
#pragma once

#include <cstdint>

#include "../kernel.cuh"
#include "../tile/cached_rows.cuh"
#include "../tile/format.cuh"
#include "expand.cuh"
#include "paged.cuh"
#include "problem.cuh"

namespace op {

constexpr int nonfinite_threads = 128, nonfinite_queries = 32;   // of a block

// The values of eight columns that are not finite, of the keys that a query sees: a bit for each column.
struct Nonfinite {
    uint32_t positive = 0, negative = 0, nan = 0;

    template <class Element>
    __device__ void add(const uint4 &eight) {
        constexpr uint32_t exponent = exponent_bits<Element>;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const uint32_t value = reinterpret_cast<const uint32_t *>(&eight)[i / 2] >> (16 * (i % 2)) & 0xffffu;
            if ((value & exponent) != exponent) continue;
            uint32_t &kind = (value & 0x7fffu) != exponent ? nan : value & 0x8000u ? negative : positive;
            kind |= 1u << i;
        }
    }
    __device__ bool any() const { return (positive | negative | nan) != 0; }
    __device__ bool has(int i) const { return (positive | negative | nan) >> i & 1; }
    // Their sum, under weights above 0.
    __device__ float sum(int i) const {
        if ((nan | (positive & negative)) >> i & 1) return __uint_as_float(0x7fffffffu);
        return positive >> i & 1 ? INFINITY : -INFINITY;
    }
};

// An output with strides in elements; at most one of the three pointers is not null.
struct NonfiniteOutput {
    __nv_bfloat16 *bf16;
    __half *f16;
    float *f32;
    StridesQ strides;

    __device__ void store(size_t at, float value) const {
        if (bf16) bf16[at] = __float2bfloat16_rn(value);
        if (f16) f16[at] = __float2half_rn(value);
        if (f32) f32[at] = value;
    }
};

// What the keys of a sequence are to its queries: query i sees the keys i + first .. i + end - 1 that exist.
struct SeenKeys {
    int keys, first, end;

    __device__ SeenKeys(int keys, int queries, int left, int right)
        : keys(keys), first(keys - queries - min(left, keys)), end(keys - queries + min(right, queries - 1) + 1) {}
};

// Replaces elements of outputs in the columns of values that are not finite, of rows that see their keys, by the sum of
// these values. Only heads and sequences with a mark other than 0 are looked at. The grid is queries, heads, sequences.
template <class Element>
__device__ inline void add_nonfinite(RowFormat format, const PagedRows &rows, const PageTable &table, int begin_query,
                                     int end_query, const SeenKeys &seen, const NonfiniteOutput &out, int batch,
                                     int head, int group, int dim) {
    const int eights = dim / 8, step = nonfinite_threads / eights, lane = threadIdx.x / eights,
              column = threadIdx.x % eights * 8, first_query = blockIdx.x * nonfinite_queries;
    if (lane >= step) return;
    for (int query = first_query + lane; query < min(first_query + nonfinite_queries, end_query - begin_query);
         query += step) {
        Nonfinite found;
        for (int key = max(query + seen.first, 0); key < min(query + seen.end, seen.keys); ++key) {
            const PageTable::Place place = table.place(key);
            const char *codes = rows.codes + place.page * rows.code_strides.page + place.row * rows.code_strides.token;
            const char *scales =
                rows.scales + place.page * rows.scale_strides.page + place.row * rows.scale_strides.token;
            found.add<Element>(expand_eight<Element>(format, codes, scales, column));
        }
        if (!found.any()) continue;
        for (int member = 0; member < group; ++member) {
            const size_t at = batch * out.strides.batch + head * out.strides.head + member * out.strides.group +
                              (begin_query + query) * out.strides.query + column;
            for (int i = 0; i < 8; ++i)
                if (found.has(i)) out.store(at + i, found.sum(i));
        }
    }
}

}   // namespace op
