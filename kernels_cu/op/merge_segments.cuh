// The kernel that merges segments: loads of their rows, and the tree over them.
#pragma once

#include <cstdint>

#include "../kernel.cuh"
#include "../ptx/access_early.cuh"
#include "../ptx/access_early_if.cuh"
#include "../ptx/alu.cuh"
#include "../ptx/math.cuh"
#include "../tile/team.cuh"
#include "cast.cuh"
#include "early.cuh"
#include "merge.cuh"

namespace op {

// The columns of a segment's row that a lane merges.
template <int columns>
struct PartOfRow {
    float element[columns];

    // Zeros unless `present`.
    __device__ void load(const float *at, bool present) {
        if constexpr (columns == 4) {
            uint32_t words[4];
            ptx::ld_global_16(words, at, present);
#pragma unroll
            for (int i = 0; i < 4; ++i) element[i] = __uint_as_float(words[i]);
        } else {
#pragma unroll
            for (int i = 0; i < columns; ++i) element[i] = ptx::ld_global_f32_if(present, at + i, 0.0f);
        }
    }
};

// An array whose rows are those of one place, so that an address needs no arithmetic where it is used.
template <class Element>
__device__ inline Strided<Element> moved_to(Strided<Element> array, int64_t b, int64_t h, int64_t r, int64_t c) {
    if (array.data) array.data = array.at(b, h, r, c);
    return array;
}

// The sum of a team's segments: that of each lane, then of pairs of lanes, and so on. Called by all lanes of a warp.
template <class Node>
__device__ inline Node sum_of_team(const tile::Team &team, const Node (&some)[merge_batch]) {
    Node node = some[0].with(some[1]).with(some[2].with(some[3]));
#pragma unroll 1
    for (int distance = 1; distance < team.size; distance *= 2)
        node = node.with(node.each([&](float value) { return team.partner(value, distance); }));
    return node;
}

// Merges `columns` columns of a row, from element `first` of all rows on, and with column 0 the row's maximum and sums.
// The members of a team have the same piece and share its segments: each adds merge_batch neighbors. Called by all
// lanes of a warp.
template <int columns>
__device__ inline void merge_columns_of_row(const tile::Team &team, const Segments &segments, const Merged &merged,
                                            int64_t first) {
    const bool natural = segments.natural;
    // Everything that needs no memory stands before the wait.
    const int64_t rows = segments.rows(), row = first / segments.dim_v, column = first - row * segments.dim_v;
    const int64_t all_heads = row / segments.queries;
    const int query = row - all_heads * segments.queries, batch = all_heads / segments.heads,
              head = all_heads - batch * segments.heads;
    const int head_kv = segments.v_global ? head / int(segments.heads / segments.heads_kv) : 0;
    const auto out_bf16 = moved_to(merged.out_bf16, batch, head, query, column);
    const auto out_f16 = moved_to(merged.out_f16, batch, head, query, column);
    const auto out_f32 = moved_to(merged.out_f32, batch, head, query, column);
    const int begin = team.member() * merge_batch, step = team.size * merge_batch;   // this lane's; of the team
    const int end = row < rows ? segments.splits : 0;
    int64_t place = begin * rows + row;   // of the first segment of a batch, among all rows
    const float *part_at = segments.partial + place * segments.width + column;
    const int64_t part_step = rows * segments.width;
    wait_for_launches_ahead();

    // The largest logarithm of all segments, relative to which those in units of e are summed.
    float top = -INFINITY;
    if (natural) {
#pragma unroll 1
        for (int split = begin; split < end; split += step)
#pragma unroll 1
            for (int i = 0; i < merge_batch && split + i < end; ++i)
                top = ptx::max_nan_f32(top, segments.row_max[(split + i) * rows + row]);
        for (int distance = 1; distance < team.size; distance *= 2)
            top = ptx::max_nan_f32(top, team.partner(top, distance));
    }

    // The binary tree over the segments of a lane, then over the team, whose first member has the sum. Nodes of teams
    // that are left siblings wait in `pending`: member i has that of level i, of up to 6.
    Piece<columns> node, pending;
    int teams = 0;   // added before
    for (int split = begin;; split += step, ++teams) {
        // Neighboring segments, relative to integer maxima. All loads of maxima are in flight at once, then all others.
        float max[merge_batch], sum[merge_batch], exact[merge_batch] = {};
        PartOfRow<columns> part[merge_batch];
#pragma unroll
        for (int i = 0; i < merge_batch; ++i)
            max[i] = ptx::ld_global_f32_if(split + i < end, segments.row_max + place + i * rows, -INFINITY);
        if (segments.exact_sum)
#pragma unroll
            for (int i = 0; i < merge_batch; ++i)
                exact[i] = ptx::ld_global_f32_if(max[i] != -INFINITY, segments.exact_sum + place + i * rows, 0.0f);
#pragma unroll
        for (int i = 0; i < merge_batch; ++i) {   // where the maximum is -inf, the values may be anything
            const bool present = max[i] != -INFINITY;
            part[i].load(part_at + i * part_step, present);
            sum[i] = ptx::ld_global_f32_if(present && segments.row_sum, segments.row_sum + place + i * rows,
                                           present ? 1.0f : 0.0f);
        }
        place += step * rows;
        part_at += step * part_step;

        Piece<columns> some[merge_batch];
        bool whole = !natural;   // whether all maxima are integers
#pragma unroll
        for (int i = 0; i < merge_batch; ++i) {
            some[i].max = !natural ? ceilf(max[i]) : max[i] == -INFINITY ? -INFINITY : 0.0f;
            whole = whole && some[i].max == max[i];
#pragma unroll
            for (int j = 0; j < columns; ++j) some[i].value[j] = part[i].element[j];
            some[i].value[columns] = sum[i];
            some[i].value[columns + 1] = segments.exact_sum ? exact[i] : sum[i];
        }
        if (!whole)
#pragma unroll
            for (int i = 0; i < merge_batch; ++i) {
                // Below 2^-200 a segment adds nothing, and exp_f32 overflows at -2^127.
                const float above = natural ? top : some[i].max;
                const float weight = max[i] == -INFINITY || (!natural && max[i] == above) ? 1.0f
                                     : !natural                 ? ptx::ex2_approx_ftz_f32(max[i] - above)
                                     : max[i] - above < -200.0f ? 0.0f
                                                                : exp_f32(max[i] - above);
#pragma unroll
                for (int j = 0; j < columns + 2; ++j) some[i].value[j] *= weight;
            }
        node = sum_of_team(team, some);
        if (step >= segments.splits) break;

        node = node.each([&](float x) { return team.of(x, 0); });
        int level = 0;
        for (; teams >> level & 1; ++level) node = pending.each([&](float x) { return team.of(x, level); }).with(node);
        if (split - begin + step >= segments.splits) {
            // The right edge, smallest nodes first; `node` holds the last one and its level.
            for (++level; teams >> level; ++level)
                if (teams >> level & 1) node = pending.each([&](float x) { return team.of(x, level); }).with(node);
            break;
        }
        if (team.member() == level) pending = node;
    }
    if (team.member() != 0 || row >= rows) return;
    const auto at = [&](auto *values, int64_t place) { return values ? values + place : nullptr; };
    const RowEnding ending{at(segments.sinks, head), at(segments.row_shift, row), at(segments.v_global, head_kv),
                           at(merged.lse, row),      at(merged.max, row),         at(merged.sum, row)};
    finish_piece(ending, node, natural, top, column == 0, [&](const float (&values)[columns]) {
        store_columns(out_bf16, 0, 0, 0, 0, values);
        store_columns(out_f16, 0, 0, 0, 0, values);
        store_columns(out_f32, 0, 0, 0, 0, values);
    });
}

// Whether the segments are those of one attention call: sums in units of 2, which nothing joins, for one output in 16
// bits with rows of whole pieces, and no more segments than a team loads at once.
__device__ inline bool are_usual(const Segments &segments, const Merged &merged) {
    const auto bits = [](const auto *array) { return reinterpret_cast<uintptr_t>(array); };
    const auto others = bits(segments.exact_sum) | bits(segments.sinks) | bits(segments.row_shift) |
                        bits(segments.v_global) | bits(merged.out_f32.data) | bits(merged.lse) | bits(merged.max) |
                        bits(merged.sum);
    return others == 0 && segments.row_sum && !merged.out_bf16.data != !merged.out_f16.data && !segments.natural &&
           segments.splits <= 16 * merge_batch && segments.rows() * segments.dim_v < 1 << 30 &&
           (segments.dim_v | segments.width) % merge_columns == 0;
}

// Merges such segments. All but the loads runs twice: at first on nothing while the launch ahead runs, so that the code
// need not come from memory behind the wait.
__device__ inline void merge_usual_segments(const tile::Team &team, const Segments &segments, const Merged &merged) {
    using Node = Piece<merge_columns - 1>;   // without exact_sum
    const uint32_t first = team.item(blockIdx.x * merge_threads + threadIdx.x) * merge_columns, dim_v = segments.dim_v,
                   queries = segments.queries, heads = segments.heads;
    const uint32_t row = first / dim_v, column = first - row * dim_v, all_heads = row / queries,
                   batch = all_heads / heads;
    const uint32_t rows = segments.rows();
    const bool in_f16 = merged.out_f16.data;
    const auto of = [](const auto &out) {
        return Strided<uint16_t>{reinterpret_cast<uint16_t *>(out.data), out.batch, out.head, out.row, out.column};
    };
    const auto out = moved_to(in_f16 ? of(merged.out_f16) : of(merged.out_bf16), batch, all_heads - batch * heads,
                              row - all_heads * queries, column);
    const int begin = team.member() * merge_batch;
    const int64_t place = int64_t(begin) * rows + row;   // of the first segment among all rows
    const float *max_at = segments.row_max + place, *sum_at = segments.row_sum + place,
                *part_at = segments.partial + (place * segments.width + column);
    const int64_t part_step = rows * segments.width;
    const int present = row < rows ? segments.splits - begin : 0;
    float max[merge_batch], sum[merge_batch];
    uint16_t values[merge_columns];
    PartOfRow<merge_columns> part[merge_batch];
#pragma unroll
    for (int i = 0; i < merge_batch; ++i) max[i] = -INFINITY, sum[i] = 0.0f, part[i] = {};
#pragma unroll 1
    for (int turn = ptx::mov_b32(0); turn < 2; ++turn) {
        if (turn == 1) {
            wait_for_launches_ahead();
#pragma unroll
            for (int i = 0; i < merge_batch; ++i)
                max[i] = ptx::ld_global_f32_if(i < present, max_at + i * rows, -INFINITY);
            const auto load_others = [&](auto &&written) {
#pragma unroll
                for (int i = 0; i < merge_batch; ++i) {
                    sum[i] = ptx::ld_global_f32_if(written(i), sum_at + i * rows, 0.0f);
                    part[i].load(part_at + i * part_step, written(i));
                }
            };
            // Only where some segments have no values do these loads wait for the maxima.
            if (segments.complete) load_others([&](int i) { return i < present; });
            else load_others([&](int i) { return max[i] != -INFINITY; });
        }
        Node some[merge_batch];
        bool whole = true;   // whether all maxima are integers
#pragma unroll
        for (int i = 0; i < merge_batch; ++i) {
            some[i].max = ceilf(max[i]);
            whole = whole && some[i].max == max[i];
#pragma unroll
            for (int j = 0; j < merge_columns; ++j) some[i].value[j] = max[i] == -INFINITY ? 0.0f : part[i].element[j];
            some[i].value[merge_columns] = max[i] == -INFINITY ? 0.0f : sum[i];
        }
        if (!whole)
#pragma unroll
            for (int i = 0; i < merge_batch; ++i) {
                const float weight = max[i] == some[i].max ? 1.0f : ptx::ex2_approx_ftz_f32(max[i] - some[i].max);
#pragma unroll
                for (int j = 0; j < merge_columns + 1; ++j) some[i].value[j] *= weight;
            }
        const Node node = sum_of_team(team, some);
        const float total = node.value[merge_columns], factor = total == 0.0f ? 0.0f : 1.0f / total;
#pragma unroll
        for (int i = 0; i < merge_columns; ++i) {
            const float value = node.value[i] * factor;
            values[i] = in_f16 ? __half_as_ushort(__half(value)) : __bfloat16_as_ushort(__nv_bfloat16(value));
        }
    }
    wait_for_launches_ahead();   // it has waited: this is for whoever reads the code
    if (begin == 0 && present > 0) store_columns(out, 0, 0, 0, 0, values);
}

// Merges the segments in their order. The grid has a thread for each member of the team of each piece.
__device__ inline void merge_segments(const Segments &segments, const Merged &merged) {
    if (are_usual(segments, merged)) {
        merge_usual_segments(tile::Team(merge_team(segments.splits)), segments, merged);
        return;
    }
    const tile::Team team(merge_team(segments.splits));
    const int64_t first = team.item(int64_t(blockIdx.x) * merge_threads + threadIdx.x) * merge_columns;
    if (segments.dim_v % merge_columns == 0 && segments.width % merge_columns == 0) {
        merge_columns_of_row<merge_columns>(team, segments, merged, first);
        return;
    }
#pragma unroll 1
    for (int i = 0; i < merge_columns; ++i)   // a piece may span two rows
        merge_columns_of_row<1>(team, segments, merged, first + i);
}

}   // namespace op
