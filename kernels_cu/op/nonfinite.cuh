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

// The outputs of attention, of which one is not null.
struct NonfiniteOutputs {
    __nv_bfloat16 *bf16;
    __half *f16;
    float *f32;
    StridesQ bf16_strides, f16_strides, f32_strides;

    // Adds a value that is not finite. NaN for another reason stays NaN.
    __device__ void add(int batch, int head, int group, int query, int column, float value) const {
        const auto at = [&](const StridesQ &strides) {
            return batch * strides.batch + head * strides.head + group * strides.group + query * strides.query + column;
        };
        if (bf16) bf16[at(bf16_strides)] = __float2bfloat16_rn(__bfloat162float(bf16[at(bf16_strides)]) + value);
        if (f16) f16[at(f16_strides)] = __float2half_rn(__half2float(f16[at(f16_strides)]) + value);
        if (f32) f32[at(f32_strides)] += value;
    }
};

// The queries of the sequences, all or packed, and the keys that they see: query i of a sequence the existing ones
// among i + first .. i + end - 1.
struct SeenKeys {
    int batch, begin_query, end_query, keys, first, end;

    __device__ SeenKeys(const int *query_starts, const int *query_ends, int queries, int keys, int left, int right)
        : batch(query_starts ? 0 : blockIdx.z), begin_query(query_starts ? query_starts[blockIdx.z] : 0),
          end_query(query_ends ? query_ends[blockIdx.z] : queries), keys(keys) {
        const int count = end_query - begin_query;
        first = keys - count - min(left, keys);
        end = keys - count + min(right, count - 1) + 1;
    }
};

// Adds values that are not finite to the outputs of the rows that see their keys, in their columns. The grid is
// queries, heads, sequences.
template <class Element>
__device__ inline void add_nonfinite_values(RowFormat format, const PagedRows &rows, const PageTable &table,
                                            const SeenKeys &seen, const NonfiniteOutputs &out, int group, int dim) {
    const int eights = dim / 8, step = nonfinite_threads / eights, lane = threadIdx.x / eights,
              column = threadIdx.x % eights * 8, first_query = blockIdx.x * nonfinite_queries,
              end_query = min(first_query + nonfinite_queries, seen.end_query - seen.begin_query);
    if (lane >= step) return;
    for (int query = first_query + lane; query < end_query; query += step) {
        Nonfinite found;
        for (int key = max(query + seen.first, 0); key < min(query + seen.end, seen.keys); ++key) {
            const PageTable::Place place = table.place(key);
            const char *codes = rows.codes + place.page * rows.code_strides.page + place.row * rows.code_strides.token;
            const char *scales =
                rows.scales + place.page * rows.scale_strides.page + place.row * rows.scale_strides.token;
            found.add<Element>(expand_eight<Element>(format, codes, scales, column));
        }
        if (!found.any()) continue;
        for (int member = 0; member < group; ++member)
            for (int i = 0; i < 8; ++i)
                if (found.has(i))
                    out.add(seen.batch, blockIdx.y, member, seen.begin_query + query, column + i, found.sum(i));
    }
}

// The same of values in float16 or bfloat16, for heads and sequences with a mark other than 0.
__device__ inline void add_nonfinite(const uint32_t *marks, int sequences, bool is_f16, RowFormat format,
                                     const PagedRows &rows, const PageTable &table, const SeenKeys &seen,
                                     const NonfiniteOutputs &out, int group, int dim) {
    if (!marks[blockIdx.y * sequences + blockIdx.z]) return;
    if (is_f16) add_nonfinite_values<__half>(format, rows, table, seen, out, group, dim);
    else add_nonfinite_values<__nv_bfloat16>(format, rows, table, seen, out, group, dim);
}

}   // namespace op
