// Matrix products of up to 64 rows in 16 bits, with the sums and the bits of gemm_small.cuh, for many of these rows:
// reads of A by all blocks, which pass through the L2, then take as long as those of B from memory. C is floats,
// without an activation or with a gate.
//
// A block has twice the columns, and twice the warps: two for each run of the depth, which share steps of 64 bytes of
// the rows of A in a ring of shared memory. Only some machines have enough of it; on others these products are those of
// gemm_small.cuh.
#pragma once

#include <cstdint>

#include "../ptx/named_barrier.cuh"
#include "gemm_small.cuh"

namespace op {

constexpr int wide_rows = 64, wide_halves = 2;

template <class Format>
struct WideShared {
    static constexpr int stages = 3;   // of A
    union Warp {
        FewRing<Format> ring;
        tile::AccumulatorStaging<few_cols> staging[wide_rows / 16];
    };
    Warp warp[wide_halves][few_warps];
    uint4 a[few_warps][stages][wide_rows / 8][32];   // a chunk of each lane
};
constexpr bool has_wide_blocks = ptx::shared_bytes_per_block >= sizeof(WideShared<tile::Bf16>);

// C of up to 64 rows and 64 columns.
template <class Format, class RowsA>
__device__ inline void gemm_of_wide_blocks(const RowsA &a, const OperandRows &b, const GemmOptions &options) {
    using Element = typename Expanded<Format, Format>::Element;
    using Share = tile::StepShare<8>;
    using Ring = FewRing<Format>;
    using Shared = WideShared<Format>;
    constexpr int step_bytes = Ring::unit_bytes, tiles = Ring::tiles, fragments = wide_rows / 8;
    constexpr int copied = fragments / wide_halves;   // of a step of A, by each of two warps
    auto &shared = ::shared<Shared>();
    // The place and rows of A are found before the wait, unless they are in memory.
    TilePlace place;
    GemmOptions in_order = options;
    in_order.group_starts = nullptr, in_order.order = nullptr;   // so that the compiler knows it
    if (options.group_starts) {
        ptx::griddepcontrol_wait();
        place = TilePlace::of_block<wide_rows, wide_halves * few_cols, false, true>(options);
    } else {
        place = TilePlace::of_block<wide_rows, wide_halves * few_cols, false, true>(in_order);
    }
    const int warp = ptx::of_this_branch(threadIdx.x / 32);
    const int half = warp / few_warps, run = warp % few_warps;
    place.first_col += half * few_cols;
    if (!place.there) return ptx::griddepcontrol_wait();
    FewCopies<Format, 16> copies(shared.warp[half][run].ring, b, options, place, run);
    copies.settle();
    const int rows = min(place.end_row - place.first_row, wide_rows), first = half * copied;
    const int there = ceil_div(rows - Share::row(), 8) - first;   // of this lane's rows of A
    const int at = step_bytes * copies.begin + 2 * Share::first();
    int left = a.bytes - at;
    const uint8_t *from[copied];
    const auto find_a = [&](const GemmOptions &options) {
#pragma unroll
        for (int i = 0; i < copied; ++i)
            from[i] = RowOfA<Format>(a, options, place, Share::row() + 8 * (first + i)).codes + at;
    };
    if (!options.order) find_a(in_order);
    const uint32_t chunks = static_cast<uint32_t>(__cvta_generic_to_shared(&tile::of_lane(shared.a[run][0][0])));
    constexpr uint32_t stage_bytes = sizeof(shared.a[0][0]), fragment_bytes = sizeof(shared.a[0][0][0]);
    uint32_t filled = 0, read = 0, stage_read = 0;   // where stages of A and of B begin
    // Starts copying this warp's part of the next step of A. Rows past the end are zeros: all blocks would meet at the
    // last one in the L2.
    const auto copy_a = [&] {
#pragma unroll
        for (int i = 0; i < copied; ++i) {
            ptx::cp_async_cg_16(chunks + filled + (first + i) * fragment_bytes, from[i], left > 0 && i < there);
            from[i] += step_bytes;
        }
        left -= step_bytes;
        filled = next_in_ring(filled, stage_bytes, Shared::stages);
    };
    ptx::griddepcontrol_wait();
    if (options.order) find_a(options);
    copies.copy(), copy_a(), ptx::cp_async_commit_group();
    copy_a(), ptx::cp_async_commit_group();
    tile::Accumulator sums[fragments][tiles / 2] = {};
#pragma unroll 1
    for (int unit = copies.begin; unit < copies.end; unit += Ring::units) {
#pragma unroll
        for (int step = 0; step < Ring::units; ++step) {
            if (step > 0 && unit + step >= copies.end) break;
            ptx::cp_async_wait_group<1>();
            ptx::bar_sync(1 + run, 32 * wide_halves);   // both warps see this step and have read the one before
            copy_a();
            if (step == 0) copies.copy();
            ptx::cp_async_commit_group();
            uint32_t pairs_b[tiles][4];
#pragma unroll
            for (int i = 0; i < tiles; ++i) {
                uint32_t words[4];
                copies.rows.read(words, stage_read, 0, step, i);
#pragma unroll
                for (int j = 0; j < 4; ++j) pairs_b[i][j] = times_one(words[j], Element{});
            }
            const uint4 *const of_a = &tile::of_lane(shared.a[run][0][0]) + read / sizeof(uint4);
#pragma unroll
            for (int j = 0; j < fragments; ++j) {
                const uint4 chunk = of_a[32 * j];
                const uint32_t pairs_a[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
                for (int k = 0; k < 2; ++k) multiply_pairs(sums[j], pairs_b, pairs_a, k, Element{});
            }
            read = next_in_ring(read, stage_bytes, Shared::stages);
        }
        stage_read = next_in_ring(stage_read, sizeof(typename Ring::Stage), Ring::stages);
    }
    ptx::cp_async_wait_group<0>();
    ptx::bar_warp_sync();   // all lanes have read B, which the sums overwrite
#pragma unroll
    for (int j = 0; j < fragments; j += 2) put_transposed(shared.warp[half][run].staging[j / 2], sums[j], sums[j + 1]);
    ptx::griddepcontrol_launch_dependents();
    FewElements<fragments> elements;
    elements.load(options, place, rows, run);
    ptx::bar_sync();   // all threads see the sums of all runs
    end_few_rows<typename FewExpanded<Format, Format>::Runs>(shared.warp[half], options, place, elements, rows, run);
}

template <class Format>
using WideOrFewShared = std::conditional_t<has_wide_blocks, WideShared<Format>, FewShared<Format, Format>>;
constexpr int wide_warps = (has_wide_blocks ? wide_halves : 1) * few_warps;
constexpr int wide_cols = (has_wide_blocks ? wide_halves : 1) * few_cols;

template <class Format, class RowsA>
__device__ inline void gemm_of_many_few_rows(const RowsA &a, const OperandRows &b, const GemmOptions &options) {
    if constexpr (has_wide_blocks) gemm_of_wide_blocks<Format>(a, b, options);
    else gemm_of_few_rows<Format, Format, true>(a, b, options);
}

}   // namespace op

// An entry for 33 to 64 rows.
#define WIDE_GEMM(name, Element, Format)                                                                               \
    KERNEL(name, .threads = {32 * op::wide_warps}, .shared_bytes = sizeof(op::WideOrFewShared<Format>),                \
           .tile = {op::wide_cols, op::wide_rows, 1}, .min_blocks = op::has_wide_blocks ? 1 : op::few_blocks)          \
    GEMM_IN_16_BITS(Element, op::gemm_of_many_few_rows<Format>)
